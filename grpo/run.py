"""From a configuration to everything a run needs, checked in the order of cost: config, files and rewards before any model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from grpo import checkpoint
from grpo.batch import Batch, Group, Problem, cut
from grpo.config import Config, ConfigError, check_world_size
from grpo.data import ProblemSet, Rows, Schedule, check_enough, fingerprint, load_rows, make_problems
from grpo.describe import memory_line, summary
from grpo.distributed import World
from grpo.environment import environment, record_start
from grpo.evaluation import evaluate, judge_of, metric_names
from grpo.evaluation.verdict import check_names
from grpo.lock import Lock
from grpo.logprobs import CompletionScorer
from grpo.metrics import Accumulator, Reporter
from grpo.model import (
    Policy,
    check_context,
    halve_reference,
    load_policy,
    load_tokenizer,
    make_optimizer,
    make_reference,
    make_schedule,
    num_parameters,
    resolve_model,
)
from grpo.output import find_resume_point, note_differences, refuse_changes, start_output
from grpo.rehearsal import rehearse
from grpo.rewards import RewardResult, RewardRunner
from grpo.rewards.groups import score_groups
from grpo.rollout import Sampling
from grpo.saving import Saver, versions
from grpo.signals import Signals, not_yet


@dataclass
class Run:
    """What the loop works with."""

    config: Config
    world: World
    policy: Policy
    scorer: nn.Module
    """Log-probs of the policy with gradient; DDP-wrapped when there are several ranks."""
    bare_scorer: CompletionScorer
    """The same, never wrapped: for passes without gradient."""
    ref_scorer: CompletionScorer | None
    """Of the frozen reference; None when ``beta`` is 0, and then no reference is in memory."""
    optimizer: torch.optim.Optimizer
    schedule: Any
    """Learning rates."""
    problems: Schedule
    eval_problems: list[Problem]
    rewards: RewardRunner
    reporter: Reporter
    start: int
    """Steps already done."""
    max_steps: int
    before: dict[str, float] | None = None
    """The evaluation before training."""
    num_tokens: int = 0
    """Prompt and completion tokens seen so far, over all ranks."""
    skipped_in_a_row: int = 0
    old_logprobs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Rows of this step's batch and the old log-probs of the loss for them, part by part."""
    signals: Signals = field(init=False)
    saver: Saver = field(init=False)
    lock: Lock = field(default_factory=Lock)
    """On ``output_dir``: no second run writes there."""

    @property
    def packed(self) -> bool:
        """Whether each prompt is computed once per group when scoring."""
        return self.bare_scorer.packed

    @torch.no_grad()
    def logprobs(self, scorer: CompletionScorer, batch: Batch) -> torch.Tensor:
        """Log-probs of a whole batch without gradient, ``[B, T]`` fp32, in passes of ``tokens_per_microbatch``."""
        logprobs_BT = torch.zeros(batch.completion_mask_BT.shape, device=self.world.device)
        with self.policy.autocast(), self.reporter.bar("log-probs", len(batch), "row") as bar:
            for rows in cut(batch, self.config.optim.tokens_per_microbatch, packed=scorer.packed):
                scored_bt, _ = scorer(*batch.rows(rows).to_score)
                logprobs_BT[rows.to(scored_bt.device), : scored_bt.shape[1]] = scored_bt
                bar.update(len(rows))
        return logprobs_BT

    @property
    def sampling(self) -> Sampling:
        names = {field.name for field in dataclasses.fields(Sampling)}
        values = {name: value for name, value in self.config.rollout.model_dump().items() if name in names}
        return Sampling(**values | {"stop": tuple(self.config.rollout.stop)})

    def score(self, groups: Sequence[Group]) -> tuple[torch.Tensor, RewardResult]:
        """Every reward of every completion: ``[P, G, F]`` fp32, NaN where a function gave None; and what went wrong.

        Raises:
            RewardContractError: if a function returned something that is no reward.
        """
        result = score_groups(self.rewards, groups)
        values = torch.tensor([[math.nan if v is None else v for v in row] for row in result.values])
        return values.view(len(groups), -1, len(self.rewards.names)), result

    def evaluate(self, step: int) -> dict[str, float]:
        """``eval/...`` metrics of the current weights; empty without evaluation data."""
        if not self.eval_problems:
            return {}
        e = self.config.eval
        with self.reporter.bar(
            "evaluation", len(self.eval_problems[:: self.world.size]) * (1 + (e.num_samples > 1)), "problem"
        ) as bar:
            return evaluate(
                self.policy,
                self.eval_problems,
                judge_of(self.config, self.rewards),
                self.world,
                num_samples=e.num_samples,
                temperature=e.temperature,
                max_completion_length=self.config.rollout.max_completion_length,
                stop=tuple(self.config.rollout.stop),
                tokens_in_flight=self.config.rollout.tokens_in_flight,
                seed=self.config.seed,
                step=0,  # the same samples' addresses each time: curves differ by the weights alone
                on_problems=bar.update,
            ).metrics

    def close(self) -> None:
        self.rewards.close()
        self.reporter.close()
        self.signals.close()
        self.lock.release()


def prepare(config: Config, world: World) -> Run | None:
    """Check and build everything; None if the run is already complete.

    Raises:
        ValueError: for what the user got wrong, in one line (see ``tests/test_bad_input.py``).
    """
    not_yet()
    check_world_size(config, world.size)
    lock = Lock()
    resume = _agreed(world, lambda: find_resume_point(config, lock))
    rewards = RewardRunner(
        config.reward.functions,
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers,
        device=world.device,
    )
    run = None
    try:
        run = _prepare(config, world, rewards, resume, lock)
    finally:
        if run is None:
            rewards.close()
            lock.release()
    return run


def _prepare(config: Config, world: World, rewards: RewardRunner, resume: Path | None, lock: Lock) -> Run | None:
    train_rows, eval_rows = world.together(lambda: _checked_rows(config, world, rewards))

    state = checkpoint.read_state(resume) if resume else {}
    facts = {"data_fingerprint": fingerprint(train_rows)}
    world.same_everywhere(facts["data_fingerprint"], f"{train_rows.what} is not the same on all ranks")
    if resume:
        refuse_changes(config, state, facts)
        if world.is_main:
            note_differences(state, {"world_size": world.size, "versions": versions()})
    if world.is_main and config.model.name_or_path == "builtin:tiny" and not resume:
        print("builtin:tiny: looking in the cache, else building it (about a minute) ...", flush=True)
    with world.main_first():
        path = resolve_model(
            config.model.name_or_path, config.data.dataset, trust_remote_code=config.model.trust_remote_code
        )
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    train = make_problems(train_rows, config.data, tokenizer)
    evaluation = make_problems(eval_rows, config.data, tokenizer) if eval_rows else ProblemSet([])
    problems = Schedule(
        train.problems,
        prompts_per_step=config.rollout.prompts_per_step,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
    )
    max_steps = config.optim.max_steps or max(math.ceil(config.optim.num_epochs * problems.steps_per_epoch), 1)
    start = state.get("step", 0)
    if start >= max_steps and not state.get("unreported"):
        if world.is_main:
            print(f"already complete: {resume} is at step {start} of {max_steps}; nothing to do", flush=True)
        return None

    options = dict(
        device=world.device, precision=config.runtime.precision, **config.model.model_dump(exclude={"name_or_path"})
    )
    everything = [*train.problems, *evaluation.problems]
    check_context(path, everything, config.rollout.max_completion_length, trust_remote_code=trust)
    policy = load_policy(str(resume or path), tokenizer, **options)
    policy.capture = config.runtime.cuda_graphs
    a, o = config.algorithm, config.optim
    ref_scorer = None
    if a.beta > 0:
        anchor = policy.model
        if resume:  # the reference is where training began, not where it was interrupted
            anchor = load_policy(path, tokenizer, **options).model
        ref_scorer = CompletionScorer(make_reference(anchor), config.rollout.temperature)
    optimizer = make_optimizer(policy.model, learning_rate=o.learning_rate, betas=o.betas, weight_decay=o.weight_decay)
    schedule = make_schedule(
        optimizer,
        name=o.lr_scheduler_type,
        num_updates=max_steps * a.updates_per_step,
        warmup_steps=o.warmup_steps,
        min_lr=o.min_lr,
    )
    if resume:
        moving = ref_scorer.model if ref_scorer and a.ref_sync_steps else None
        try:
            checkpoint.restore(resume, optimizer=optimizer, schedule=schedule, reference=moving, device=world.device)
        except (UnpicklingError, RuntimeError, ValueError, KeyError) as error:  # made elsewhere: whole, but not ours
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{resume} cannot be continued from ({type(error).__name__}: {reason})") from None
    policy.model.train()
    scorer = CompletionScorer(policy.model, config.rollout.temperature)
    if not config.runtime.packed:
        why_padded = "runtime.packed is false"
    elif not config.model.disable_dropout:
        why_padded = "model.disable_dropout is false, and attention over a packed row has no dropout"
    else:
        why_padded = scorer.pack_groups()
    if ref_scorer is not None:
        if scorer.packed:
            ref_scorer.pack_groups()
        if not a.ref_sync_steps and ref_scorer.plain_head is not None:  # one that moves needs all its bits
            halve_reference(ref_scorer.model, policy)

    here = environment(world.size) | {"from_step": start, "num_parameters": num_parameters(policy.model)}
    here["num_eval_problems"] = len(evaluation.problems[: config.eval.max_samples])
    with world.main_first():
        if world.is_main:
            start_output(config, resume, lock)
            record_start(config.output_dir, here)
    reporter = Reporter(
        config.output_dir,
        is_main=world.is_main,
        first_step=start,
        max_steps=max_steps,
        redo_line=bool(state.get("unreported")),
        every=config.logging.every,
        wandb_mode=config.logging.wandb,
        project=config.logging.project,
        run_name=config.logging.run_name,
        wandb_run_id=state.get("wandb_run_id"),
        config=config.model_dump(mode="json") | {"environment": here},
    )
    policy.say = reporter.say
    run = Run(
        config=config,
        world=world,
        policy=policy,
        scorer=world.data_parallel(scorer, touch_every_parameter(policy)),
        bare_scorer=scorer,
        ref_scorer=ref_scorer,
        optimizer=optimizer,
        schedule=schedule,
        problems=problems,
        eval_problems=evaluation.problems[: config.eval.max_samples],
        rewards=rewards,
        reporter=reporter,
        start=start,
        max_steps=max_steps,
        before=state.get("before"),
        num_tokens=state.get("num_tokens", 0),
        skipped_in_a_row=state.get("skipped_in_a_row", 0),
        lock=lock,
    )
    run.saver = Saver(run, facts, state)
    if not config.debug:
        run.saver.rehearse()
    run.signals = Signals(world)
    lines = summary(
        config,
        num_parameters=num_parameters(policy.model),
        device=world.device.type,
        world_size=world.size,
        train=train,
        evaluation=run.eval_problems,
        steps_per_epoch=problems.steps_per_epoch,
        max_steps=max_steps,
    )
    longest = max(len(problem.prompt_ids) for problem in everything)
    lines.append(memory_line(config, policy, ref_scorer and ref_scorer.model, world.size, longest))
    if why_padded:
        lines.append(f"note      {why_padded}: each prompt is computed once per completion when scoring")
    for line in lines + [f"resuming  {resume} at step {start}"] * bool(resume):
        reporter.say(line)
    wanted = config.runtime.rehearse
    if not config.debug and (world.device.type == "cuda" if wanted is None else wanted):
        reporter.say(rehearse(run, train.problems))
    return run


def _checked_rows(config: Config, world: World, rewards: RewardRunner) -> tuple[Rows, Rows | None]:
    """Training and evaluation rows, checked against the rewards and the size of a step; no model is looked at yet."""
    train_rows = load_rows(config.data, train=True, seed=config.seed)
    eval_rows = load_rows(config.data, train=False, seed=config.seed)
    unit = world.size * config.algorithm.num_minibatches
    check_enough(len(train_rows.prompts), config.rollout.prompts_per_step, unit=unit)
    rewards.check({"answer", *train_rows.columns[0]} if config.data.answer_column else set(train_rows.columns[0]))
    best, known = config.checkpoint.keep_best, metric_names(config.eval.num_samples, rewards.names)
    if best and (eval_rows is None or best not in known):
        need = "needs evaluations: set data.eval_split" if eval_rows is None else f"is none of {', '.join(known)}"
        raise ConfigError(f"checkpoint.keep_best={best} {need}")
    check_names(config, rewards.names)
    return train_rows, eval_rows


def touch_every_parameter(policy: Policy):
    ids_BS = torch.tensor([[policy.pad_id, policy.pad_id]], device=policy.device)
    mask_BT = torch.ones(1, 1, dtype=torch.bool, device=policy.device)
    lengths_B = torch.ones(1, dtype=torch.long, device=policy.device)

    def first_forward(module: nn.Module) -> torch.Tensor:
        with policy.autocast():
            return module(ids_BS, lengths_B, mask_BT)[0].sum()

    return first_forward


def _agreed(world: World, look):
    """The main rank's answer on every rank: two ranks that look at a changing folder could see two things."""
    found, error = None, None
    if world.is_main:
        try:
            found = look()
        except Exception as caught:  # raised on all ranks together
            error = caught
    world.raise_together(error)
    return world.gather_objects(found)[0]


def check_rewards(run: Run, result: RewardResult | None, error: Exception | None, metrics: Accumulator) -> None:
    """Count failures; raise on all ranks if a reward broke its contract on one, or failed on every completion on all.

    Args:
        result: what this rank's rewards gave; None after ``error``, or if it had nothing to score.
    """
    run.world.raise_together(error)
    names = run.rewards.names
    failures, rows = (result.failures, len(result.values)) if result else ([0] * len(names), 0)
    for name, count in zip(names, failures, strict=True):
        metrics.add(f"rewards/{name}/errors", count, 0)
    *failed, rows = run.world.sum(torch.tensor([*failures, rows])).tolist()
    for name, count in zip(names, failed, strict=True):
        if rows and count == rows:
            trace = result.first_traceback.get(name) if result else None
            raise ValueError(
                f"reward {name!r} failed on all {rows} completions of this step"
                + (f":\n{trace}" if trace else " (timeout)")
            )

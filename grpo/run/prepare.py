"""From a configuration to a run, checked in the order of cost: files and rewards, then tokenizer and data, then the model.

What may fail on one rank alone (a file that one machine lacks) happens inside ``World.together``: all ranks then stop with its message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from grpo.config import Config, ConfigError, check_world_size
from grpo.data import ProblemSet, Rows, Schedule, check_enough, fingerprint, load_rows, make_problems
from grpo.distributed import World
from grpo.evaluation import metric_names
from grpo.evaluation.verdict import check_names
from grpo.logprobs import CompletionScorer
from grpo.model import (
    Policy,
    cast_reference_to_bf16,
    check_context,
    load_policy,
    load_tokenizer,
    make_reference,
    num_parameters,
    resolve_model,
)
from grpo.rewards import RewardRunner
from grpo.rollout import BuiltinEngine
from grpo.run import checkpoint
from grpo.run.lock import Lock
from grpo.run.optimizer import follow_settings, make_optimizer, make_schedule
from grpo.run.output_folder import find_resume_point, note_differences, refuse_changes, start_output
from grpo.run.rehearsal import rehearse
from grpo.run.saver import Saver, versions
from grpo.run.signals import Signals, not_yet
from grpo.run.state import Run
from grpo.run.summary import memory_line, summary
from grpo.telemetry.environment import environment, record_start
from grpo.telemetry.metrics import Reporter


@dataclass
class _Start:
    """Where a run begins: afresh (step 0), or from a checkpoint."""

    resume: Path | None
    state: dict[str, Any]
    """What the checkpoint says; empty without one."""
    is_fork: bool
    """Continued from a checkpoint of another folder."""
    settings_changed: bool
    """``checkpoint.accept_changes`` took some."""

    @property
    def step(self) -> int:
        return self.state.get("step", 0)

    def inherited(self, name: str) -> Any:
        """Something of the checkpoint's that belongs to its folder."""
        return None if self.is_fork else self.state.get(name)


@dataclass
class _Models:
    policy: Policy
    scorer: CompletionScorer
    ref_scorer: CompletionScorer | None
    optimizer: torch.optim.Optimizer
    schedule: Any
    why_padded: str | None
    """Why each completion is scored with its own copy of the prompt; None: it is not."""


def prepare(config: Config, world: World) -> Run | None:
    """Check and build everything; None if the run is already complete.

    Raises:
        ValueError: for what the user got wrong, in one line (see ``tests/test_bad_input.py``).
    """
    not_yet()
    check_world_size(config, world.size)
    lock = Lock()
    resume, origin = _decided_by_main(world, lambda: find_resume_point(config, lock))
    rewards = world.together(
        lambda: RewardRunner(
            config.reward.functions,
            timeout_s=config.reward.timeout_s,
            num_workers=config.reward.num_workers,
            device=world.device,
        )
    )
    run = None
    try:
        run = _prepare(config, world, rewards, resume, origin, lock)
    finally:
        if run is None:
            rewards.close()
            lock.release()
    return run


def _prepare(
    config: Config, world: World, rewards: RewardRunner, resume: Path | None, origin: dict | None, lock: Lock
) -> Run | None:
    train_rows, eval_rows = world.together(lambda: _checked_rows(config, world, rewards))
    facts = {"data_fingerprint": fingerprint(train_rows)}
    world.same_everywhere(facts["data_fingerprint"], f"{train_rows.what} is not the same on all ranks")
    start = world.together(lambda: _start(config, resume, facts))
    if resume and world.is_main:
        note_differences(start.state, {"world_size": world.size, "versions": versions()})
    if world.is_main and config.model.name_or_path == "builtin:tiny" and not resume:
        print("builtin:tiny: looking in the cache, else building it (about a minute) ...", flush=True)
    trust = config.model.trust_remote_code
    with world.main_first():
        path = resolve_model(config.model.name_or_path, config.data.dataset, trust_remote_code=trust)
    tokenizer, train, evaluation = world.together(lambda: _problems(config, path, train_rows, eval_rows))
    problems = Schedule(
        train.problems,
        prompts_per_step=config.rollout.prompts_per_step,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
    )
    max_steps = config.optim.max_steps or max(math.ceil(config.optim.num_epochs * problems.steps_per_epoch), 1)
    if start.step >= max_steps and not start.state.get("unreported"):
        if world.is_main:
            print(f"already complete: {resume} is at step {start.step} of {max_steps}; nothing to do", flush=True)
        return None
    models = world.together(lambda: _models(config, world.device, path, tokenizer, max_steps, start))
    policy = models.policy

    here = environment(world.size) | {"from_step": start.step, "num_parameters": num_parameters(policy.model)}
    here["num_eval_problems"] = len(evaluation.problems[: config.eval.max_samples])
    with world.main_first():
        if world.is_main:
            start_output(config, resume, lock)
            record_start(config.output_dir, here)
    reporter = Reporter(
        config.output_dir,
        is_main=world.is_main,
        first_step=start.step,
        max_steps=max_steps,
        redo_line=bool(start.state.get("unreported")),
        every=config.logging.every,
        wandb_mode=config.logging.wandb,
        project=config.logging.project,
        run_name=config.logging.run_name,
        wandb_run_id=start.inherited("wandb_run_id"),
        config=config.model_dump(mode="json") | {"environment": here},
    )
    engine = BuiltinEngine(
        policy,
        fast_decode=config.runtime.fast_decode,
        cuda_graphs=config.runtime.cuda_graphs,
        warn=reporter.say,
    )
    run = Run(
        config=config,
        world=world,
        policy=policy,
        engine=engine,
        scorer=world.data_parallel(models.scorer, touch_every_parameter(policy)),
        bare_scorer=models.scorer,
        ref_scorer=models.ref_scorer,
        optimizer=models.optimizer,
        schedule=models.schedule,
        problems=problems,
        eval_problems=evaluation.problems[: config.eval.max_samples],
        rewards=rewards,
        reporter=reporter,
        start=start.step,
        max_steps=max_steps,
        before=start.state.get("before"),
        num_tokens=start.state.get("num_tokens", 0),
        skipped_in_a_row=start.state.get("skipped_in_a_row", 0),
        lock=lock,
    )
    facts["origin"] = origin or start.state.get("origin")
    run.saver = Saver(run, facts, start.state | {"best": start.inherited("best")})
    if not config.debug:
        run.saver.rehearse()
    run.signals = Signals(world)
    _describe(run, train, evaluation, models.why_padded, resume)
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


def _start(config: Config, resume: Path | None, facts: dict[str, Any]) -> _Start:
    if resume is None:
        return _Start(None, {}, is_fork=False, settings_changed=False)
    state = checkpoint.read_state(resume)
    changed = refuse_changes(config, state, facts)
    return _Start(resume, state, resume.parent.resolve() != Path(config.output_dir).resolve(), changed)


def _problems(
    config: Config, path: str, train_rows: Rows, eval_rows: Rows | None
) -> tuple[Any, ProblemSet, ProblemSet]:
    """The tokenizer, and the problems of both splits, which fit into the model's context."""
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    train = make_problems(train_rows, config.data, tokenizer)
    evaluation = make_problems(eval_rows, config.data, tokenizer) if eval_rows else ProblemSet([])
    everything = [*train.problems, *evaluation.problems]
    check_context(path, everything, config.rollout.max_completion_length, trust_remote_code=trust)
    return tokenizer, train, evaluation


def _models(config: Config, device: torch.device, path: str, tokenizer: Any, max_steps: int, start: _Start) -> _Models:
    """Policy, reference, optimizer and schedule, as they are at the step where the run begins."""
    a, o = config.algorithm, config.optim
    options = dict(
        device=device, precision=config.runtime.precision, **config.model.model_dump(exclude={"name_or_path"})
    )
    policy = load_policy(str(start.resume or path), tokenizer, **options)
    ref_scorer = None
    if a.beta > 0:
        anchor = policy.model
        if start.resume:  # the reference is where training began, not where it was interrupted
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
    if start.resume:
        settings = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
        moving = ref_scorer.model if ref_scorer and a.ref_sync_steps else None
        try:
            checkpoint.restore(
                start.resume,
                optimizer=optimizer,
                schedule=None if start.settings_changed else schedule,
                reference=moving,
                device=device,
            )
        except (UnpicklingError, RuntimeError, ValueError, KeyError) as error:  # made elsewhere: whole, but not ours
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{start.resume} cannot be continued from ({type(error).__name__}: {reason})") from None
        if start.settings_changed:
            follow_settings(optimizer, schedule, settings, num_updates=start.step * a.updates_per_step)
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
        ref_scorer.plain_head  # noqa: B018  measured now, while its weights are fp32
        if not a.ref_sync_steps:  # one that moves needs all its bits
            cast_reference_to_bf16(ref_scorer.model, policy)
    return _Models(policy, scorer, ref_scorer, optimizer, schedule, why_padded)


def _describe(run: Run, train: ProblemSet, evaluation: ProblemSet, why_padded: str | None, resume: Path | None) -> None:
    """What is about to happen, on the console."""
    config, world = run.config, run.world
    lines = summary(
        config,
        num_parameters=num_parameters(run.policy.model),
        device=world.device.type,
        world_size=world.size,
        train=train,
        evaluation=run.eval_problems,
        eval_left_out=evaluation.num_too_long + evaluation.num_empty,
        steps_per_epoch=run.problems.steps_per_epoch,
        max_steps=run.max_steps,
    )
    longest = max(len(problem.prompt_ids) for problem in [*train.problems, *evaluation.problems])
    lines.append(memory_line(config, run.policy, run.ref_scorer and run.ref_scorer.model, world.size, longest))
    if why_padded:
        lines.append(f"note      {why_padded}: each prompt is computed once per completion when scoring")
    for line in lines + [f"resuming  {resume} at step {run.start}"] * bool(resume):
        run.reporter.say(line)


def touch_every_parameter(policy: Policy) -> Callable[[nn.Module], torch.Tensor]:
    """A forward pass of a scorer that uses every parameter of the policy: one token, for DDP to see their order."""
    ids_BS = torch.tensor([[policy.pad_id, policy.pad_id]], device=policy.device)
    mask_BT = torch.ones(1, 1, dtype=torch.bool, device=policy.device)
    lengths_B = torch.ones(1, dtype=torch.long, device=policy.device)

    def first_forward(module: nn.Module) -> torch.Tensor:
        with policy.autocast():
            return module(ids_BS, lengths_B, mask_BT)[0].sum()

    return first_forward


def _decided_by_main(world: World, look: Callable[[], Any]) -> Any:
    """The main rank's answer on every rank: two ranks that look at a changing folder could see two things."""
    found = world.together(lambda: look() if world.is_main else None)
    return world.gather_objects(found)[0]

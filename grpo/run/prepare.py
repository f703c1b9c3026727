"""Builds a run from its configuration. Cheap checks come first: files, rewards, then tokenizer and data, then models.

Code that may fail on one rank alone is inside ``world.fail_together()``: all ranks then stop with that rank's message.
"""

from __future__ import annotations

import contextlib
import math
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo.algorithm.batch import Problem
from grpo.attention import fast_paths
from grpo.checkpoint.format import Trained
from grpo.checkpoint.resume import (
    Lock,
    StartPoint,
    check_shared,
    content_digests,
    find_checkpoint,
    print_differences,
    read_start_point,
    start_output,
)
from grpo.checkpoint.saver import Progress, Saver, bits_depend_on
from grpo.config import SERVER_KEYS, Config, ConfigError, check_world_size, flat, mask_command_line
from grpo.data import ProblemSet, Rows, Schedule, check_enough, fingerprint, load_rows, make_problems
from grpo.distributed import World, is_sharded, wrap_data_parallel
from grpo.evaluation import metric_names
from grpo.evaluation.collect import check_eval_context, eval_sampling
from grpo.evaluation.grading import check_reward_names
from grpo.model import check_context, check_reference, load_tokenizer, model_digests, num_parameters, resolve_model
from grpo.model.lora import load_peft, read_adapter_config
from grpo.rewards import RewardRunner, RewardSpec
from grpo.rewards.code import check_rows
from grpo.rollout import split_stop
from grpo.run.memory import try_largest_step
from grpo.run.models import any_forward, build_models
from grpo.run.objects import Objects
from grpo.run.own import load_own_functions
from grpo.run.proofs import prove_update
from grpo.run.records import Learner, Log, Run, Sampler, Tasks
from grpo.run.signals import Signals, ignore_save_signal
from grpo.run.summary import print_summary
from grpo.telemetry.records import environment, record_start
from grpo.telemetry.reporter import Reporter
from grpo.turns.engine import TurnsEngine
from grpo.turns.tools import Tools
from grpo.vllm import build_engine

OWN_TO_A_MACHINE = (
    "output_dir", "model.name_or_path", "model.reference", "model.adapter", "data.dataset", "data.eval_dataset",
    "checkpoint.resume", "runtime.device", "runtime.threads_per_rank", *(f"rollout.{key}" for key in SERVER_KEYS),
)  # fmt: skip
"""Settings that may differ between the machines of a run. Where they name files, the content is compared."""


def prepare(config: Config, world: World, objects: Objects | None = None) -> Run | None:
    """Check and build everything; None if the run is already complete.

    Args:
        objects: of a program that goes on after the run; None for a process that ends with the run.

    Raises:
        ValueError: on a user error, with a message of one line.
    """
    with contextlib.ExitStack() as on_failure:
        run = _prepare(config, world, objects, on_failure)
        if run is not None:
            on_failure.pop_all()  # the run closes everything at its own end
        return run


def _prepare(config: Config, world: World, objects: Objects | None, on_failure: contextlib.ExitStack) -> Run | None:
    fast_paths.reset()
    ends_process = objects is None or not world.is_alone
    objects = objects or Objects()
    ignore_save_signal()
    world.check_same(_shared_settings(config))
    check_world_size(config, world.size)
    lock, found = Lock(), None
    on_failure.callback(lock.release)
    with world.fail_together():
        if config.uses_lora:
            load_peft()
        if config.model.adapter is not None:
            read_adapter_config(config.model.adapter)
        if world.is_main:  # in a folder that changes, two ranks could find different checkpoints
            found = find_checkpoint(config, lock)
        own = load_own_functions(config)
        specs = [RewardSpec(f.name, f.weight, f.args, objects.rewards.get(f.name)) for f in config.reward.functions]
        tools = None
        if config.uses_turns:
            tools = Tools(config, objects.tools)
            on_failure.callback(tools.close)
            specs = tools.load().reward_specs(specs)
        settings = dict(timeout_s=config.reward.timeout_s, num_workers=config.reward.num_workers)
        rewards = RewardRunner(specs, device=world.device, environments=tools, **settings)
        on_failure.callback(rewards.close)
        train_rows, eval_rows = _checked_rows(config, rewards, objects)
    checkpoint, origin = world.from_main(found)
    data_fingerprint = fingerprint(train_rows)
    if world.is_main:
        notes = [*rewards.notes, *(tools.notes if tools else ())]
        print_notes(list(dict.fromkeys(notes)), objects, checkpoint)

    path, reference = _resolved_models(config, world)
    with world.fail_together():
        own_files = {**(tools.source_files if tools else {}), **own.source_files}
        content = content_digests(config, path, rewards, reference, own_files)
        content |= {"the evaluation rows": fingerprint(eval_rows)} if eval_rows else {}
        model = model_digests("", path, with_weights=not world.is_alone)
    read = {f"the content of model.name_or_path{name}": value[:12] for name, value in model.items()}
    read["the rows of data.dataset"] = data_fingerprint[:12]
    named = "reward.functions, own loss or advantages, reference model, adapter or evaluation rows"
    read[f"the content of {named}"] = _joint_digest(content)
    world.check_same(read)
    with world.fail_together():
        start = read_start_point(config, checkpoint, origin, data_fingerprint, content)
    progress = Progress.from_state(start.state)
    progress.forget_chosen(config)
    if checkpoint and world.is_main:
        print_differences(start, bits_depend_on(world))

    if world.is_main and not config.data.dataset.startswith("builtin:"):
        print(f"tokenizing {len(train_rows.prompts):,} prompts with the tokenizer of {path} ...", flush=True)
    with world.fail_together():
        tokenizer, train, evaluation = _tokenized(config, path, train_rows, eval_rows, tools)
        if reference is not None:
            trust, longest = config.model.trust_remote_code, config.rollout.max_completion_length
            check_reference(reference, tokenizer, train.problems, longest, trust_remote_code=trust)
    sharing = dict(seed=config.seed, rank=world.rank, world_size=world.size)
    problems = Schedule(train.problems, prompts_per_step=config.rollout.prompts_per_step, **sharing)
    max_steps = config.optim.max_steps or max(math.ceil(config.optim.num_epochs * problems.steps_per_epoch), 1)
    if progress.step >= max_steps and not progress.evaluation_is_due(config.eval, max_steps):
        if world.is_main:
            print(f"already complete: {checkpoint}, step {progress.step} of {max_steps}; a new output_dir starts anew")
        return None

    models = build_models(config, world, path, tokenizer, max_steps, start, reference)
    policy, eval_problems = models.policy, evaluation.problems[: config.eval.max_samples]
    if world.is_main:
        print_new_learning_rate(start, float(models.optimizer.param_groups[0]["lr"]))
    mask_command_line()
    facts = environment(world.size) | {"from_step": progress.step, "num_parameters": num_parameters(policy.model)}
    facts["num_eval_problems"] = len(eval_problems)
    with world.main_first():
        if world.is_main:
            start_output(config, checkpoint, lock)
            record_start(config.output_dir, facts)
    holder = world.from_main(lock.holder)
    with world.fail_together():
        if is_sharded(models.scorer):
            check_shared(Path(config.output_dir), holder)
    position = dict(first_step=progress.step, max_steps=max_steps)
    wandb_run_id = start.state.get("wandb_run_id")
    reporter = Reporter(config, is_main=world.is_main, **position, wandb_run_id=wandb_run_id, environment=facts)
    on_failure.callback(reporter.close)
    builtin = dict(policy=models.sampler, gathered=models.gathered, is_llama=models.is_llama)
    builtin |= {"fast_decode": config.runtime.fast_decode, "cuda_graphs": True}
    builtin["warn"] = partial(print_from_rank, world, reporter)
    longest, probe_ids = _longest(config, train.problems, eval_problems), train.problems[0].prompt_ids
    where = dict(path=path, root=models.scorer, folder=config.output_dir)
    engine = build_engine(config, world, policy, **where, longest=longest, probe_ids=probe_ids, builtin=builtin)
    on_failure.callback(engine.close)
    if tools:
        engine = TurnsEngine(engine, tools, config, warn=builtin["warn"], num_ranks=world.size)
        with world.fail_together():
            engine.check()
    tokens = config.optim.tokens_per_microbatch
    for note in prove_update(world, policy, models.scorer, tokens):
        reporter.print(note)
    scorer = wrap_data_parallel(models.scorer, world, any_forward(policy))
    compared = {"data_fingerprint": data_fingerprint, "origin": start.origin, "content": content}
    trained = Trained(policy, models.optimizer, models.moving_reference)
    saver = Saver(config, world, trained, reporter, progress, max_steps, compared)
    if not config.debug:
        saver.try_saving()
    signals = Signals(world, ends_process=ends_process)
    on_failure.callback(signals.close)
    learner = Learner(
        config=config,
        world=world,
        progress=progress,
        policy=policy,
        scorer=scorer,
        bare_scorer=models.scorer,
        ref_scorer=models.ref_scorer,
        optimizer=models.optimizer,
        lr_schedule=models.lr_schedule,
        reporter=reporter,
        objective=own.objective or config.algorithm.objective,
        own_advantages=own.advantages,
    )
    run = Run(
        config=config,
        world=world,
        progress=progress,
        learner=learner,
        sampler=Sampler(config, world, progress, engine),
        tasks=Tasks(problems, eval_problems, rewards, tools),
        log=Log(reporter, saver, signals, lock),
        max_steps=max_steps,
    )
    print_summary(run, train, evaluation, models.why_padded, checkpoint)
    wanted = config.runtime.try_largest_step
    if not config.debug and (world.device.type == "cuda" if wanted is None else wanted):
        reporter.print(try_largest_step(run, train.problems))
    return run


def _shared_settings(config: Config) -> dict[str, Any]:
    """The settings that all ranks need to share, by key; the names of functions without the folder of their file."""
    values = dict(flat(config.for_writing()))
    for key in ("algorithm.objective", "algorithm.advantages"):
        values[key] = Path(values[key] or "").name
    values["reward.functions"] = [entry | {"name": Path(entry["name"]).name} for entry in values["reward.functions"]]
    return {key: value for key, value in values.items() if key not in OWN_TO_A_MACHINE}


def _joint_digest(digests: dict[str, str]) -> str:
    """One digest of those of several files, whatever the names of their folders on this machine."""
    return sha256(" ".join(sorted(digests.values())).encode()).hexdigest()[:12]


def _checked_rows(config: Config, rewards: RewardRunner, objects: Objects) -> tuple[Rows, Rows | None]:
    """The rows of training and evaluation, checked against the rewards and the size of a step."""
    load = partial(load_rows, config.data, seed=config.seed, has_environment=bool(config.environment))
    train_rows = load(train=True, table=objects.train_rows)
    eval_rows = load(train=False, table=objects.eval_rows)
    check_enough(len(train_rows.prompts), config.rollout.prompts_per_step)
    for rows in filter(None, (train_rows, eval_rows)):
        # A rollout function may add columns.
        columns = None if config.rollout.function else rows.columns[0]
        rewards.check(columns, f"the rows of {rows.source}")
        has_pattern = config.data.answer_pattern is not None
        check_rows(rewards.specs, rows.columns, rows.source, rows.places, has_pattern=has_pattern)

    metric = config.checkpoint.keep_best
    known = metric_names(config.eval.num_sampled, rewards.names)
    if metric and eval_rows is None:
        raise ConfigError(f"checkpoint.keep_best={metric} needs evaluations: set data.eval_split")
    if metric and metric not in known:
        raise ConfigError(f"checkpoint.keep_best={metric} is none of {', '.join(known)}")
    check_reward_names(config.eval, rewards.names)
    return train_rows, eval_rows


def _resolved_models(config: Config, world: World) -> tuple[str, str | None]:
    """The folders or Hub ids of the model and of ``model.reference``; the main rank builds or downloads them first."""
    with world.main_first():
        dataset, options = config.data.dataset, dict(trust_remote_code=config.model.trust_remote_code)
        path = resolve_model(config.model.name_or_path, dataset, **options)
        reference = config.model.reference if config.algorithm.beta > 0 else None
        if reference is not None:
            reference = resolve_model(reference, dataset, **options)
    return path, reference


def _tokenized(
    config: Config, path: str, train_rows: Rows, eval_rows: Rows | None, tools: Tools | None
) -> tuple[Any, ProblemSet, ProblemSet]:
    """The tokenizer, and the problems of both splits; all fit into the model's context together with a completion."""
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trust, chat_template=config.model.chat_template)
    split_stop(tokenizer, config.rollout.stop)  # refuses strings that could never match
    schemas_of = tools and tools.schemas_of
    train = make_problems(train_rows, config.data, tokenizer, schemas_of=schemas_of)
    evaluation = (
        make_problems(eval_rows, config.data, tokenizer, schemas_of=schemas_of) if eval_rows else ProblemSet([])
    )
    check_context(path, train.problems, config.rollout.max_completion_length, trust_remote_code=trust)
    if evaluation.problems:
        check_eval_context(config, path, evaluation.problems)
    return tokenizer, train, evaluation


def _longest(config: Config, train: list[Problem], evaluation: list[Problem]) -> int:
    """The most tokens of a prompt and its completion, in rollouts and evaluations."""
    kinds = (train, config.rollout), (evaluation, eval_sampling(config))
    if config.environment or config.rollout.function:  # which may make prompts longer
        return config.data.max_prompt_length + max(sampling.max_completion_length for _, sampling in kinds)
    return max(len(p.prompt_ids) + sampling.max_completion_length for problems, sampling in kinds for p in problems)


def print_notes(notes: list[str], objects: Objects, checkpoint: Path | None) -> None:
    if checkpoint and (objects.rewards or objects.tools):
        notes.append(
            "note: rewards, tools and environments that are Python objects are not compared with those of the steps "
            "before: after a change to one, take another output_dir"
        )
    for note in notes:
        print(note, flush=True)


def print_new_learning_rate(start: StartPoint, new: float) -> None:
    old = start.state.get("learning_rate")
    if start.changes and old != new:
        print(f"note: the learning rate of the next step becomes {new:.3g} (in the checkpoint: {old:.3g})", flush=True)


def print_from_rank(world: World, reporter: Reporter, text: str) -> None:
    """Print a line about this rank, also if it is not the main one: what slows one rank down slows all."""
    if world.is_main:
        reporter.print(text if world.size == 1 else f"[rank 0] {text}")
    else:
        print(f"[rank {world.rank}] {text}", file=sys.stderr, flush=True)

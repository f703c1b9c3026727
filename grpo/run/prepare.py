"""Build a run from its configuration.

Cheap checks come first: rewards, data, then models. So a mistake shows within seconds.

Code that may fail on one rank alone is inside ``world.fail_together()``: all ranks then stop with
the message of that rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo.checkpoint.format import TrainedTensors
from grpo.checkpoint.resume import (
    Lock,
    StartPoint,
    content_digests,
    find_checkpoint,
    is_in_output_dir,
    read_start_point,
    start_output,
)
from grpo.checkpoint.saver import Progress, Saver
from grpo.config import (
    Config,
    ConfigError,
    check_world_size,
    mask_command_line,
    settings_of_all_ranks,
)
from grpo.data import (
    ProblemSet,
    Rows,
    Schedule,
    check_enough,
    fingerprint,
    load_rows,
    make_problems,
)
from grpo.distributed import World, wrap_data_parallel
from grpo.evaluation import metric_names
from grpo.evaluation.collect import check_eval_context, eval_sampling
from grpo.evaluation.grading import check_reward_names
from grpo.model import (
    check_context,
    check_reference,
    load_tokenizer,
    resolve_model,
)
from grpo.rewards import RewardRunner, RewardSpec
from grpo.rewards.code import check_rows
from grpo.rollout import BuiltinEngine, Engine, split_stop
from grpo.run.memory import forget_lowered_limits, try_largest_step
from grpo.run.models import Models, build_models
from grpo.run.records import Learner, Log, Run, Sampler, Tasks
from grpo.run.signals import Signals
from grpo.run.steps import evaluation_is_due
from grpo.run.summary import print_summary
from grpo.run.user_functions import UserFunctions, load_user_functions, try_advantages
from grpo.run.user_objects import NO_OBJECTS, UserObjects
from grpo.telemetry.records import append_line, environment
from grpo.telemetry.reporter import Reporter
from grpo.turns.engine import TurnsEngine
from grpo.turns.tools import Tools
from grpo.vllm import build_engine


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run besides models: the user's functions and tools, and rows of datasets."""

    user: UserFunctions
    tools: Tools
    rewards: RewardRunner
    train: Rows
    evaluation: Rows | None


def prepare(
    config: Config,
    world: World,
    user_objects: UserObjects = NO_OBJECTS,
) -> Run | None:
    """Check the configuration and build the run; None if the run is already complete.

    Args:
        user_objects: rewards, tools and rows that a calling program passes. Default: the
            configuration names everything.

    Raises:
        ValueError: if the user made a mistake, with a message of one line.
    """
    with contextlib.ExitStack() as on_failure:
        run = _prepare(config, world, user_objects, on_failure)
        if run is not None:
            on_failure.pop_all()  # the run closes everything at its own end
    return run


def _prepare(
    config: Config,
    world: World,
    user_objects: UserObjects,
    on_failure: contextlib.ExitStack,
) -> Run | None:
    """Do the work of :func:`prepare`. After an error, ``on_failure`` closes everything that was
    opened."""
    # Ranks with different settings would wait for each other in different collectives.
    world.check_same(settings_of_all_ranks(config))
    check_world_size(config, world.size)

    # The files that the run reads, and the step where it starts.
    lock = Lock()
    on_failure.callback(lock.release)
    checkpoint_and_origin = None
    with world.fail_together():
        # The main rank decides: in a folder that changes, two ranks could find different
        # checkpoints.
        if world.is_main:
            checkpoint_and_origin = find_checkpoint(config, lock)
        inputs = _read_inputs(config, world, user_objects, on_failure)
    checkpoint, origin = world.broadcast_from_main(checkpoint_and_origin)

    resolve = partial(
        resolve_model,
        dataset=config.data.dataset,
        trust_remote_code=config.model.trust_remote_code,
    )
    reference = None
    needs_reference = config.algorithm.beta > 0 or inputs.user.needs_reference
    with world.main_first():  # the main rank builds or downloads the models
        path = resolve(config.model.name_or_path)
        if config.model.reference is not None and needs_reference:
            reference = resolve(config.model.reference)
    start = _find_start(config, world, user_objects, inputs, path, reference, checkpoint, origin)
    progress = Progress.from_state(start.state)
    forget_lowered_limits(progress, config)

    # Problems, and the number of steps.
    with world.fail_together():
        tokenizer, train, evaluation = _tokenize(config, path, reference, inputs)
    schedule = Schedule(
        train.problems,
        prompts_per_step=config.rollout.prompts_per_step,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
    )
    max_steps = config.optim.max_steps
    if max_steps is None:
        max_steps = max(math.ceil(config.optim.num_epochs * schedule.steps_per_epoch), 1)

    # A run that was stopped in its last evaluation has all steps, but is not complete.
    has_evaluation_left = bool(evaluation.problems) and evaluation_is_due(
        progress, config.eval, max_steps
    )
    if progress.step >= max_steps and not has_evaluation_left:
        if world.is_main:
            print(
                f"already complete: {checkpoint}, step {progress.step} of {max_steps}; "
                "a new output_dir starts anew (not compared: what functions import, and what those "
                "passed as objects call)"
            )
        return None

    # Models: from here on a start takes memory and time.
    models = build_models(
        config,
        world,
        path,
        tokenizer,
        max_steps,
        start,
        needs_reference,
        reference,
    )
    policy = models.policy

    # Output comes only now, so that a mistake above leaves no folder, and moves no earlier run
    # aside.
    eval_problems = evaluation.problems[: config.eval.max_samples]
    # starts.jsonl and dashboards record the command line, which may have secrets.
    mask_command_line()
    facts = environment(world.size)
    facts["num_eval_problems"] = len(eval_problems)
    with world.main_first():
        if world.is_main:
            start_output(config, checkpoint, lock)
            append_line(Path(config.output_dir) / "starts.jsonl", facts)
    # A run that continues from another folder does not repeat the last line of the earlier run. An
    # exception is a step that is still to be evaluated: the evaluation is added to its line.
    continues_here = checkpoint and is_in_output_dir(checkpoint, config)
    reporter = Reporter(
        config,
        is_main=world.is_main,
        first_step=progress.step,
        max_steps=max_steps,
        newest_line=progress.line if continues_here or has_evaluation_left else None,
        wandb_run_id=start.state.get("wandb_run_id"),
    )
    on_failure.callback(reporter.close)

    # The engine, which may start vLLM. The log of vLLM goes to the output folder.
    engine = _build_engine(
        config,
        world,
        models,
        path,
        train.problems[0].prompt_ids,
        reporter,
    )
    on_failure.callback(engine.close)
    if config.uses_turns:
        engine = TurnsEngine(
            engine,
            inputs.tools,
            config,
            warn=reporter.print,
            num_ranks=world.size,
        )
        with world.fail_together():
            engine.check()

    # The four records of the run.
    learner = Learner(
        config=config,
        world=world,
        progress=progress,
        policy=policy,
        scorer=wrap_data_parallel(models.scorer, world, policy.score_one_token),
        bare_scorer=models.scorer,
        ref_scorer=models.ref_scorer,
        optimizer=models.optimizer,
        lr_schedule=models.lr_schedule,
        reporter=reporter,
        objective=inputs.user.objective or config.algorithm.objective,
        user_advantages=inputs.user.advantages,
    )
    trained = TrainedTensors(policy, models.optimizer, models.moving_reference)
    saver = Saver(config, world, trained, reporter, progress, max_steps, start.facts)
    # A full disk, or a model that cannot be saved, shows now instead of at the end.
    if not config.debug:
        saver.try_saving()
    # Signals are handled only from here on: before, a stop signal ends the process at once, as
    # there is nothing to save.
    signals = Signals(world)
    on_failure.callback(signals.close)

    run = Run(
        config=config,
        world=world,
        progress=progress,
        learner=learner,
        sampler=Sampler(config, world, progress, engine),
        tasks=Tasks(schedule, eval_problems, inputs.rewards, inputs.tools),
        log=Log(reporter, saver, signals, lock),
        max_steps=max_steps,
        user_loop=inputs.user.loop,
    )
    # Facts that a person should know before the first step.
    print_summary(run, train, evaluation, models.why_padded, checkpoint)
    tries_largest_step = config.runtime.try_largest_step
    if tries_largest_step is None:
        # On a GPU the try takes seconds. On a CPU it can take longer than a short run.
        tries_largest_step = world.device.type == "cuda"
    if tries_largest_step and not config.debug:
        reporter.print(try_largest_step(run, train.problems))
    return run


def _read_inputs(
    config: Config,
    world: World,
    user_objects: UserObjects,
    on_failure: contextlib.ExitStack,
) -> Inputs:
    """Load the user's functions and the rows, and check that they fit each other."""
    user = load_user_functions(config)
    tools, rewards = open_rewards(config, on_failure, user_objects)
    load = partial(
        load_rows,
        config.data,
        seed=config.seed,
        has_environment=bool(config.environment),
    )
    train = load(train=True, table=user_objects.train_rows)
    evaluation = load(train=False, table=user_objects.eval_rows)
    check_enough(len(train.prompts), config.rollout.prompts_per_step)
    try_advantages(config, user, train.columns[0], rewards.names)
    check_rewards(config, rewards, train)
    eval_metrics = []
    if evaluation is not None:
        check_rewards(config, rewards, evaluation)
        eval_metrics = metric_names(config.eval.num_sampled, rewards.names)
    best_metric = config.checkpoint.keep_best
    if best_metric and best_metric not in eval_metrics:
        raise ConfigError(
            f"checkpoint.keep_best={best_metric} is no metric of an evaluation of this run: "
            f"{', '.join(eval_metrics) or 'set data.eval_split'}"
        )

    # There is no reporter yet, because it needs the output folder.
    if world.is_main:
        for note in [*user.warnings, *rewards.notes]:
            print(note)
    return Inputs(user, tools, rewards, train, evaluation)


def check_rewards(config: Config, rewards: RewardRunner, rows: Rows) -> None:
    """Raise ``ValueError`` if a reward lacks a column or cannot read an answer, which would fail in
    the first step, or if ``eval`` names rewards that the run does not have."""
    rewards.check(rows.columns[0], f"the rows of {rows.source}")
    check_rows(
        rewards.specs,
        rows.columns,
        rows.source,
        rows.places,
        has_pattern=config.data.answer_pattern is not None,
    )
    check_reward_names(config.eval, rewards.names)


def open_rewards(
    config: Config,
    at_end: contextlib.ExitStack,
    user_objects: UserObjects = NO_OBJECTS,
) -> tuple[Tools, RewardRunner]:
    """Return the ``Tools`` of a run, which include its environments, and its ``RewardRunner``.

    ``at_end`` closes the worker processes of both objects.
    """
    specs = [
        RewardSpec(
            function.name,
            function.weight,
            function.args,
            user_objects.rewards.get(function.name),
        )
        for function in config.reward.functions
    ]
    tools = Tools(config, user_objects.tools)
    # The callback is registered before loading, which may fail and leave a worker behind. Without
    # tools it would start threads, for which there may be no memory.
    if config.uses_turns:
        at_end.callback(tools.close)
    rewards = RewardRunner(
        tools.load().reward_specs(specs),  # an environment may have a reward, too
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers,
        environments=tools,
    )
    at_end.callback(rewards.close)
    return tools, rewards


def _find_start(
    config: Config,
    world: World,
    user_objects: UserObjects,
    inputs: Inputs,
    path: str,
    reference: str | None,
    checkpoint: Path | None,
    origin: str | None,
) -> StartPoint:
    """Return the state that the run starts from.

    Args:
        path: folder or Hub id of the model.
        reference: folder or Hub id of the reference model; None without one.
        checkpoint: the checkpoint to continue from; None for a new run.
        origin: origin of the run, from :func:`grpo.checkpoint.resume.find_checkpoint`.

    Raises:
        ValueError: on all ranks, if ranks read different files, or if settings or files have
            changed since the checkpoint.
    """
    with world.fail_together():
        content = content_digests(
            config,
            path,
            inputs.rewards,
            reference,
            inputs.user.source_files | inputs.tools.source_files,
            user_objects.rewards | user_objects.tools,
        )
        content["the training rows"] = fingerprint(inputs.train)
        if inputs.evaluation is not None:
            content["the evaluation rows"] = fingerprint(inputs.evaluation)
        start = read_start_point(config, checkpoint, {"origin": origin, "content": content})

    # Folders may have other names on other machines, so only the digests are compared.
    files = "the content of data.dataset, model.name_or_path, reward.functions or another file"
    world.check_same({files: sorted(content.values())})

    if start.changes and world.is_main:
        changes = "; ".join(f"{key}: {old} -> {new}" for key, old, new in start.changes)
        print(f"note: checkpoint.accept_changes accepts {changes}")
    return start


def _tokenize(
    config: Config,
    path: str,
    reference: str | None,
    inputs: Inputs,
) -> tuple[Any, ProblemSet, ProblemSet]:
    """Return the tokenizer, the problems to train on, and the problems to evaluate on.

    Raises:
        ValueError: if a prompt and its completion together exceed the model's context.
    """
    trust = config.model.trust_remote_code
    max_length = config.rollout.max_completion_length
    tokenizer = load_tokenizer(
        path,
        trust_remote_code=trust,
        chat_template=config.model.chat_template,
    )
    split_stop(tokenizer, config.rollout.stop)  # refuses strings that could never match
    make = partial(
        make_problems,
        config=config.data,
        tokenizer=tokenizer,
        schemas=inputs.tools.schemas,
    )
    train = make(inputs.train)
    check_context(path, train.problems, max_length, trust_remote_code=trust)
    if reference is not None:
        check_reference(reference, tokenizer, train.problems, max_length, trust_remote_code=trust)
    evaluation = ProblemSet([])
    if inputs.evaluation is not None:
        evaluation = make(inputs.evaluation)
        check_eval_context(config, path, evaluation.problems)
    return tokenizer, train, evaluation


def _build_engine(
    config: Config,
    world: World,
    models: Models,
    path: str,
    probe_ids: Sequence[int],
    reporter: Reporter,
) -> Engine:
    """Return the engine that ``rollout.engine`` names.

    Args:
        path: the folder or Hub id that ``model.name_or_path`` stands for.
        probe_ids: token ids of a prompt. Their log-probs prove that vLLM has the policy's weights.
    """
    if config.rollout.engine == "builtin":
        return BuiltinEngine(
            models.sampler,
            fast_decode=config.runtime.fast_decode,
            cuda_graphs=True,
            gathered=models.gathered,
            warn=reporter.print,
        )
    # vLLM reserves room for the longest row of rollouts and of evaluations.
    max_completion = max(
        config.rollout.max_completion_length,
        eval_sampling(config).max_completion_length,
    )
    return build_engine(
        config,
        world,
        models.policy,
        path=path,
        root=models.scorer,
        longest=config.data.max_prompt_length + max_completion,
        probe_ids=probe_ids,
        folder=config.output_dir,
    )

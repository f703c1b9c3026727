"""Rollouts: completions of this rank's problems, and their rewards.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from tqdm import tqdm

from grpo.algorithm.advantages import has_no_advantage, values_to_compare
from grpo.algorithm.batch import Problem
from grpo.distributed import World
from grpo.rewards import RewardResult
from grpo.rewards.scores import score_groups
from grpo.run.records import Rollout, Run, Step
from grpo.system import UserError
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.records import LOGGED_PREFIX


def sample_and_score(
    run: Run,
    step: Step,
    problems: Sequence[Problem],
    *,
    are_substitutes: bool = False,
    draw: int = 0,
) -> Rollout:
    """Sample a group of completions for each problem, and call every reward function.

    Args:
        problems: problems of this rank. The list may be empty.
        are_substitutes: True if the problems replace a few problems of the step.
        draw: number of this sampling of the problems in the step. Each number gives other
            completions.

    Raises:
        Interrupted: on all ranks, if a signal asks one of them to stop.
        UserError: on all ranks, if a reward function failed on every completion, or if every
            environment that acted failed.
    """
    for problem in problems:
        sampled = (problem.index, draw)
        if sampled in step.sampled:
            raise UserError(
                "a problem is twice in this step: its completions would be the same; "
                "another number for draw gives others"
            )
        step.sampled.add(sampled)
    world = run.world
    sampling = run.sampler.sampling
    names = run.tasks.rewards.names
    G = sampling.num_generations
    max_tokens = len(problems) * G * sampling.max_completion_length
    result = RewardResult(names, 0)

    # Memory may run out, a reward fail or a signal arrive on this rank alone: the others must not
    # wait for it in the next collective.
    with world.fail_together(), world.interruptible():
        bar = tqdm(
            desc="rollout",
            total=max_tokens,
            unit="tok",
            leave=False,
            disable=None if world.is_main else True,  # None: shown if stderr is a terminal
        )
        with world.timed("rollout", step.seconds), bar:
            groups = run.sampler.engine.generate(
                problems,
                sampling,
                seed_key=(run.config.seed, f"rollout{draw or ''}", step.number),
                on_tokens=bar.update,
            )
        with world.timed("reward", step.seconds):
            if groups:
                result = score_groups(run.tasks.rewards, groups, run.trainer_state)

    completions = [completion for group in groups for completion in group.completions]
    for row, completion in enumerate(completions):
        for column, values in result.extra.items():
            completion.logged_columns[column] = values[row]
    # Substitutes are few: a function that fails on all of them need not be broken.
    add_outcome(step.metrics, result, world, is_checked=not are_substitutes)
    values_BF = numpy.array(result.values, dtype=numpy.float32)  # NaN for None
    values_PGF = torch.from_numpy(values_BF).view(len(groups), G, len(names))
    return Rollout(groups, values_PGF)


def replace_equal_groups(run: Run, step: Step, rollout: Rollout) -> Rollout:
    """Replace each group whose advantages are all 0 by a group of another problem.

    This is dynamic sampling (DAPO, section 3.2). DAPO samples until the batch is full; here a group
    that is left after the last attempt stays as it is. The other problem depends on the step, the
    position in the batch and the attempt alone, so that neither the number of ranks nor a resume
    changes it.
    """
    algorithm = run.config.algorithm
    groups = list(rollout.groups)
    values_PGF = rollout.values_PGF.clone()
    for attempt in range(algorithm.dynamic_sampling_attempts):
        values_compared_in_group = values_to_compare(
            values_PGF,
            run.tasks.rewards.weights,
            algorithm.multi_objective_aggregation,
        )
        is_replaced_P = has_no_advantage(
            values_compared_in_group,
            baseline=algorithm.baseline,
            scale=algorithm.scale,
        )
        positions = []
        problems = []
        for p in is_replaced_P.nonzero().flatten().tolist():
            problem = run.tasks.schedule.substitute(step.number, p, attempt)
            # None means that the dataset has no other problem left for this step.
            if problem is not None:
                positions.append(p)
                problems.append(problem)
        # A rank without a substitute goes on with the others, because sampling and scoring have
        # votes.
        if run.world.all_true(not problems):
            break

        substitutes = sample_and_score(run, step, problems, are_substitutes=True)
        for number, p in enumerate(positions):
            groups[p] = substitutes.groups[number]
            values_PGF[p] = substitutes.values_PGF[number]
    return Rollout(groups, values_PGF)


def add_outcome(
    metrics: Accumulator,
    result: RewardResult,
    world: World,
    *,
    is_checked: bool,
) -> None:
    """Add the numbers of failures, and the metrics that reward functions logged, to ``metrics``.

    Args:
        result: values, failures and logged metrics of this rank's completions.
        is_checked: False switches the errors below off.

    Raises:
        UserError: on all ranks, if a reward function failed on every completion, or if every
            environment that acted failed.
    """
    failures = [failure for failure in result.environment_failures if failure]
    counts = [
        *result.failures,
        len(result.values) - len(failures),
        len(result.environment_failures),
        len(failures),
    ]
    totals = world.sum(torch.tensor(counts)).tolist()
    *num_failed, num_scored, num_environments, num_failed_environments = totals

    for name, count in zip(result.names, result.failures, strict=True):
        metrics.total(f"rewards/{name}/errors", count)
    for name, pair in result.metrics.items():
        metrics.add(LOGGED_PREFIX + name, *pair)
    first_failures = list(filter(None, world.gather_objects(failures[:1])))
    if not is_checked:
        return

    # An environment whose completion was cut before its first action is not counted. If most
    # completions were cut, the few environments that acted may have failed by chance.
    all_failed = num_failed_environments == num_environments
    if all_failed and num_failed_environments > num_scored:
        raise UserError(
            f"all {num_failed_environments} environments of this step have failed, first with "
            f"{first_failures[0][0]}"
        )
    for name, count in zip(result.names, num_failed, strict=True):
        if num_scored and count == num_scored:
            # The runner has printed the whole traceback.
            raise UserError(
                f"reward {name!r} failed on all {count} completions that it got in this step: "
                f"{result.first_errors.get(name, 'on another rank')} "
                "(docs/rewards.md; completions are texts, or messages where prompts are chats; a "
                "function gets `environments` if it names it)"
            )

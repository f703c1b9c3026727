"""Rollouts: completions of this rank's problems, and their rewards.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from grpo.algorithm.advantages import has_no_advantage, values_compared
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
) -> Rollout:
    """Sample a group of completions of each problem, and call every reward function.

    Args:
        problems: this rank's; there may be none.
        are_substitutes: the problems replace a few of the step's.

    Raises:
        Interrupted: on all ranks, if a signal asks any of them to stop.
        UserError: on all ranks, if a reward function failed on every completion, or every
            environment that acted.
    """
    world = run.world
    sampling = run.sampler.sampling
    names = run.tasks.rewards.names
    most_tokens = len(problems) * sampling.num_generations * sampling.max_completion_length
    result = RewardResult(names, 0)

    # Memory may run out, a reward fail or a signal arrive on this rank alone.
    with world.fail_together(), world.interruptible():
        bar = run.log.reporter.bar("rollout", most_tokens)
        with world.timed("rollout", step.seconds), bar:
            groups = run.sampler.engine.generate(
                problems,
                sampling,
                seed_key=(run.config.seed, "rollout", step.number),
                on_tokens=bar.update,
            )
        with world.timed("reward", step.seconds):
            if groups:
                result = score_groups(run.tasks.rewards, groups, run.trainer_state)

    completions = [completion for group in groups for completion in group.completions]
    for row, completion in enumerate(completions):
        for column, values in result.extra.items():
            completion.logged[column] = values[row]
    # A function that fails on a few substitutes alone is not broken.
    add_outcome(step.metrics, result, world, is_checked=not are_substitutes)
    values_BF = torch.from_numpy(numpy.array(result.values, dtype=numpy.float32))  # NaN for None
    return Rollout(groups, values_BF.view(len(groups), sampling.num_generations, len(names)))


def replace_equal_groups(run: Run, step: Step, rollout: Rollout) -> Rollout:
    """Replace each group whose advantages are all 0 by a group of another problem.

    This is dynamic sampling (DAPO, section 3.2). The other problem is a function of step, position
    in the batch and attempt, so that neither the number of ranks nor a resume changes it. After the
    last attempt a group stays as it is.
    """
    algorithm = run.config.algorithm
    groups = list(rollout.groups)
    values_PGF = rollout.values_PGF.clone()
    for attempt in range(algorithm.dynamic_sampling_attempts):
        values_compared_in_group = values_compared(
            values_PGF,
            run.tasks.rewards.weights,
            algorithm.multi_objective_aggregation,
        )
        is_useless_P = has_no_advantage(
            values_compared_in_group,
            baseline=algorithm.baseline,
            scale=algorithm.scale,
        )
        substitutes = {}
        for p in is_useless_P.nonzero().flatten().tolist():
            problem = run.tasks.problems.substitute(step.number, p, attempt)
            if problem is not None:
                substitutes[p] = problem
        # A rank without any goes on with the others: sampling and scoring have votes.
        if run.world.all_true(not substitutes):
            break

        problems = list(substitutes.values())
        others = sample_and_score(run, step, problems, are_substitutes=True)
        for p, group, values_GF in zip(substitutes, others.groups, others.values_PGF, strict=True):
            groups[p] = group
            values_PGF[p] = values_GF
    return Rollout(groups, values_PGF)


def add_outcome(
    metrics: Accumulator,
    result: RewardResult,
    world: World,
    *,
    is_checked: bool,
) -> None:
    """Add the numbers of failures, and the metrics that reward functions logged.

    With ``is_checked``, UserError on all ranks if a function, or every environment, has failed.
    """
    failures = [failure for failure in result.environment_failures if failure]
    counts = [
        *result.failures,
        len(result.values) - len(failures),
        len(result.environment_failures),
        len(failures),
    ]
    *failed, num_scored, num_environments, num_failed = world.sum(torch.tensor(counts)).tolist()

    for name, count in zip(result.names, result.failures, strict=True):
        metrics.total(f"rewards/{name}/errors", count)
    # All ranks must add the same names, and a function may log a metric on some ranks only.
    logged = set()
    first_failures = []
    for names_of_rank, failures_of_rank in world.gather_objects(
        (set(result.metrics), failures[:1])
    ):
        logged |= names_of_rank
        first_failures += failures_of_rank
    for name in sorted(logged):
        total, count = result.metrics.get(name, (0.0, 0.0))
        metrics.add(LOGGED_PREFIX + name, total, count)
    if not is_checked:
        return

    # The environment of a completion that was cut before its first action has shown nothing, and is
    # not counted. Where most were cut, the few that acted may have failed by chance.
    if num_failed == num_environments and num_failed > num_scored:
        what = f"all {num_failed} environments of this step have failed"
        raise UserError(f"{what}, first with {first_failures[0]}")
    for name, count in zip(result.names, failed, strict=True):
        if num_scored and count == num_scored:
            trace = result.first_traceback.get(name, "")  # the runner has printed it
            error = trace.rstrip().rpartition("\n")[2] or "timeout"
            what = f"reward {name!r} failed on all {count} completions of this step"
            raise UserError(f"{what}: {error}")

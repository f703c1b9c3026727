"""A step in progress: the results of its phases, its measures, and the rewards of its completions."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo.algorithm.advantages import Scores
from grpo.algorithm.batch import Batch, Group
from grpo.algorithm.seeding import derive_seed
from grpo.rewards import RewardResult
from grpo.rewards.scores import score_groups
from grpo.run.metrics import report_details, step_line
from grpo.run.state import Run
from grpo.system import UserError, core_wait
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.records import LOGGED_PREFIX

PHASES = ("rollout", "reward", "logprobs", "update", "eval")


@dataclass
class Step:
    """One step. Tensors and groups are this rank's; ``scores`` are of all ranks.

    Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion tokens.
    """

    number: int
    """Counted from 0."""
    metrics: Accumulator = field(default_factory=Accumulator)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Of each phase on this rank."""
    groups: Sequence[Group] = ()
    scores: Scores | None = None
    batch: Batch | None = None
    old_BT: Tensor | None = None
    """Old log-probs of the loss, written by the first pass over the batch. Rows that it skips keep the sampler's."""
    line: dict[str, Any] = field(default_factory=dict)
    """The step's metrics over all ranks, for ``metrics.jsonl``."""

    def begin_update(self, groups: Sequence[Group], scores: Scores, batch: Batch) -> None:
        self.groups, self.scores, self.batch = groups, scores, batch
        self.old_BT = batch.sampling_logprobs_BT.clone()


@contextlib.contextmanager
def run_step(run: Run, number: int) -> Iterator[Step]:
    """Measure the block; then reduce its metrics over ranks, count the step as complete, report details."""
    step, config = Step(number), run.config
    started, waited = time.perf_counter(), core_wait()
    if not config.model.disable_dropout:  # the only part of a step that draws from PyTorch's global generators
        torch.manual_seed(derive_seed(config.seed, "dropout", number, run.world.rank))
    yield step
    seconds = time.perf_counter() - started
    step.metrics.maximum("step_time", seconds)
    step.metrics.maximum("time/frac_core_wait", (core_wait() - waited) / seconds)
    step.line = step_line(run, step)
    run.progress.complete_step(step.line)
    report_details(run, step)


def score(run: Run, groups: Sequence[Group]) -> tuple[Tensor, RewardResult]:
    """Every reward of every completion, ``[P, G, F]`` fp32 with NaN where a function gave None; and the failures.

    The completions get the columns that the rewards logged about them.
    """
    result = score_groups(run.rewards, groups, run.trainer_state)
    for row, completion in enumerate(completion for group in groups for completion in group.completions):
        completion.logged.update({column: values[row] for column, values in result.extra.items()})
    values = torch.tensor([[math.nan if v is None else v for v in row] for row in result.values])
    values_PGF = values.view(len(groups), -1, len(run.rewards.names))
    if run.config.algorithm.scale == "mean" and run.own.advantages is None:
        check_not_negative(run.scores(values_PGF), run.rewards.names, step=run.progress.step + 1)
    return values_PGF, result


def check_not_negative(scores: Scores, names: Sequence[str], *, step: int) -> None:
    """``UserError``, with the value of each function, if the reward of a completion is negative (MaxRL)."""
    rewards_B = scores.rewards_PG.flatten().nan_to_num(0.0)
    if (rewards_B >= 0).all():
        return
    lowest = int(rewards_B.argmin())
    values_F = scores.values_PGF.flatten(end_dim=-2)[lowest].tolist()
    parts = [f"{n} {v:g} x {w:g}" for n, v, w in zip(names, values_F, scores.weights, strict=True)]
    raise UserError(
        f"step {step}: algorithm.scale=mean (MaxRL) divides by the mean reward of a group, so rewards must not be "
        f"negative, and a completion got {rewards_B[lowest]:g} ({', '.join(parts)}): change the rewards or their "
        "weights, or take algorithm.scale=group"
    )


def count_reward_failures(
    run: Run,
    step: Step,
    result: RewardResult | None,
    *,
    is_whole_step: bool,
) -> None:
    """Count the completions that each function failed to score, and add the metrics that functions logged.

    Args:
        result: from this rank's rewards; None if this rank had nothing to score.
        is_whole_step: False for substitutes of some groups: a function that fails on one bad problem is not broken.

    Raises:
        UserError: on all ranks, if all environments of the step that acted have failed, and these are most of the
            completions, or if a function failed on every completion that it got.
    """
    world = run.world
    names = run.rewards.names
    result = result or RewardResult(names, 0)
    for name, count in zip(names, result.failures, strict=True):
        step.metrics.total(f"rewards/{name}/errors", count)

    failures = [failure for failure in result.environment_failures if failure]
    counts = [
        *result.failures,
        len(result.values) - len(failures),
        len(result.metrics),
        len(result.environment_failures),
        len(failures),
    ]
    counts = world.sum(torch.tensor(counts)).tolist()
    *failed, num_scored, num_logged, num_environments, num_failed = counts
    # The environment of a completion that was cut before its first action has shown nothing, and is
    # not counted. Where most were cut, the few that acted may have failed by chance.
    num_completions = num_scored + num_failed
    are_most = 2 * num_failed > num_completions
    if is_whole_step and are_most and num_failed == num_environments:
        first_here = failures[0] if failures else ""
        first = next(filter(None, world.gather_objects(first_here)))
        raise UserError(f"all {num_failed} environments of this step have failed, first with {first}")

    # A function may log a metric on some ranks only, and all ranks must add the same names.
    if num_logged:
        logged = set()
        for of_rank in world.gather_objects(list(result.metrics)):
            logged.update(of_rank)
        for name in sorted(logged):
            step.metrics.add(LOGGED_PREFIX + name, *result.metrics.get(name, (0.0, 0.0)))
    for name, count in zip(names, failed, strict=True):
        if is_whole_step and num_scored and count == num_scored:
            trace = result.first_traceback.get(name, "")
            error = trace.rstrip().rpartition("\n")[2]  # the runner has printed the traceback
            what = f"reward {name!r} failed on all {count} completions of this step"
            raise UserError(f"{what}: {error or 'timeout'}")

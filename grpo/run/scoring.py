"""Failures of reward functions: counted over all ranks; a function that fails on every completion stops the run."""

from __future__ import annotations

import torch

from grpo.rewards import RewardResult
from grpo.run.state import Run
from grpo.telemetry.accumulator import Accumulator


def count_reward_failures(run: Run, result: RewardResult | None, metrics: Accumulator, *, is_whole_step: bool) -> None:
    """Count the completions that each function failed to score.

    Args:
        result: from this rank's rewards; None if this rank had nothing to score.
        is_whole_step: True for all completions of a step, False for substitutes of some groups: a function that fails on a single bad
            problem is not broken.

    Raises:
        ValueError: on all ranks, if a function failed on every completion of the step.
    """
    names = run.rewards.names
    failures, rows = (result.failures, len(result.values)) if result else ([0] * len(names), 0)
    for name, count in zip(names, failures, strict=True):
        metrics.total(f"rewards/{name}/errors", count)
    *failed, rows = run.world.sum(torch.tensor([*failures, rows])).tolist()
    for name, count in zip(names, failed, strict=True):
        if is_whole_step and rows and count == rows:
            trace = result.first_traceback.get(name) if result else None
            raise ValueError(
                f"reward {name!r} failed on all {rows} completions of this step"
                + (f"\n{trace}" if trace else " (timeout)")
            )

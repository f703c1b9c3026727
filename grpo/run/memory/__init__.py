"""The memory that a rank needs: measured by a dry run of the largest possible step, or estimated from the sizes of the model."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.algorithm.batch import Problem
from grpo.run.memory.estimate import estimate_line
from grpo.run.memory.largest_step import dry_run
from grpo.run.state import Run

__all__ = ["memory_line"]


def memory_line(run: Run, train: Sequence[Problem], evaluation: Sequence[Problem]) -> str:
    """One line for the summary: the result of a dry run with ``runtime.rehearse`` (by default on CUDA), else an estimate.

    Raises:
        ValueError: on all ranks, if the dry run runs out of memory on any, with the key to lower and a value that fits.
    """
    wanted = run.config.runtime.rehearse
    if not run.config.debug and (run.world.device.type == "cuda" if wanted is None else wanted):
        return dry_run(run, train)
    return estimate_line(run, max(len(problem.prompt_ids) for problem in [*train, *evaluation]))

"""A step in progress: what its phases found, its measures, and its times.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from grpo.algorithm.batch import Batch, Group
from grpo.telemetry.accumulator import Accumulator

PHASES = ("rollout", "reward", "logprobs", "update", "eval")


@dataclass(frozen=True)
class Rollout:
    """This rank's completions of a step, and their rewards."""

    groups: Sequence[Group]
    values_PGF: Tensor
    """The value of each reward function, fp32; NaN where it gave none."""


@dataclass
class Step:
    """One step of a run."""

    number: int
    """Counted from 0."""
    metrics: Accumulator = field(default_factory=Accumulator)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Of each phase on this rank."""
    groups: Sequence[Group] = ()
    """The groups of this rank."""
    values_PGF: Tensor | None = None
    """Values of the reward functions for the completions of all ranks."""
    rewards_PG: Tensor | None = None
    """Rewards of the completions of all ranks."""
    batch: Batch | None = None
    """The rows of this rank."""
    reported_old_BT: Tensor | None = None
    """Old log-probs, for the records of completions.

    They start as the sampler's. The first iteration over the batch overwrites the rows that it computes.
    """

    def keep_for_metrics(
        self,
        groups: Sequence[Group],
        values_PGF: Tensor,
        rewards_PG: Tensor,
        batch: Batch,
    ) -> None:
        """Keep what the metrics and the records of completions need at the end of the step."""
        self.groups = groups
        self.values_PGF = values_PGF
        self.rewards_PG = rewards_PG
        self.batch = batch
        self.reported_old_BT = batch.sampling_logprobs_BT.clone()

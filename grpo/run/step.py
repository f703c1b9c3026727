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
    """This rank's."""
    values_PGF: Tensor | None = None
    """Values of the reward functions, of all ranks."""
    rewards_PG: Tensor | None = None
    """Rewards, of all ranks."""
    batch: Batch | None = None
    """This rank's rows."""
    old_BT: Tensor | None = None
    """Old log-probs of the loss, which the first pass over the batch writes.

    Rows that it skips keep the sampler's.
    """

    def begin_update(
        self,
        groups: Sequence[Group],
        values_PGF: Tensor,
        rewards_PG: Tensor,
        batch: Batch,
    ) -> None:
        """Keep what metrics and the records of completions need."""
        self.groups = groups
        self.values_PGF = values_PGF
        self.rewards_PG = rewards_PG
        self.batch = batch
        self.old_BT = batch.sampling_logprobs_BT.clone()

"""TRL's arguments of a reward besides the rows: ``trainer_state`` to read, ``log_metric`` and ``log_extra`` to report numbers and columns.

A reward gets these three only if its signature names them: they do not come in ``**kwargs``, where rewards expect columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS = frozenset({
    "step", "epoch", "reward", "reward_std", "reward_group_std", "frac_reward_zero_std", "frac_unscorable", "loss",
    "kl", "entropy", "grad_norm", "learning_rate", "ratio", "ratio_histogram", "skipped_updates", "num_tokens",
    "completion_tokens", "step_time", "tokens_per_second",
})  # fmt: skip
"""Metrics of the trainer: ``log_metric`` refuses these names."""
METRIC_GROUPS = ("clip_ratio/", "completions/", "eval/", "histograms/", "rewards/", "sampling/", "tables/", "time/")
"""``log_metric`` refuses names that start with one of these too."""
COLUMNS = frozenset({
    "step", "problem", "prompt", "answer", "completion", "rewards", "reward", "advantage", "length", "finished",
    "token_ids", "tokens", "logprobs", "updated_logprobs", "ref_logprobs", "logged",
})  # fmt: skip
"""Columns of the completions that a run keeps: ``log_extra`` refuses these names."""


@dataclass(frozen=True)
class TrainerState:
    """The position of the run, under the names of ``transformers.TrainerState``. Outside training all are 0."""

    global_step: int = 0
    """Steps that are complete: 0 in the first step."""
    epoch: float = 0.0
    max_steps: int = 0


OUTSIDE_TRAINING = TrainerState()


@dataclass
class Logged:
    """The metrics and columns that one call of a reward with ``num_rows`` completions reported."""

    num_rows: int
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> ``(sum, count)`` of its values. Each value counts once per completion of the call."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Column -> one value per completion."""
    mistake: str | None = None
    """The first misuse. Kept instead of raised: a reward may catch exceptions."""

    def log_metric(self, name: str, value: Any) -> None:
        """Report a number for this batch. NaN is left out."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.inf
        if not _is_name(name) or name in METRICS or name.startswith(METRIC_GROUPS):
            self._refuse(f"called log_metric({name!r}, ...): choose a name that no metric of the trainer has")
        elif math.isinf(number):
            kind = "infinity" if isinstance(value, float) else f"a value of type {type(value).__name__}"
            self._refuse(f"called log_metric({name!r}, ...) with {kind}: expected a finite number")
        elif not math.isnan(number):
            total, count = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (total + number * self.num_rows, count + self.num_rows)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Report a column for the completions that the run keeps. What is no number or ``None`` is kept as its text."""
        values = list(values.tolist() if hasattr(values, "tolist") else values)
        if not _is_name(column) or column in COLUMNS or column.startswith("rewards/"):
            self._refuse(f"called log_extra({column!r}, ...): choose a name that no column of the completions has")
        elif len(values) != self.num_rows:
            number = f"{len(values)} values for {self.num_rows} completions"
            self._refuse(f"called log_extra({column!r}, ...) with {number}: expected one per completion")
        else:
            self.extra[column] = [_plain(value) for value in values]

    def _refuse(self, mistake: str) -> None:
        self.mistake = self.mistake or mistake


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name != "" and name.isprintable()


def _plain(value: Any) -> str | int | float | None:
    """Numbers and text as Python's own types, which the trainer can read without the modules of the reward."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and abs(value) <= 2**53:  # a float holds it exactly
        return int(value)
    return None if value is None else str(value)

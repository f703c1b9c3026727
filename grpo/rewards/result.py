"""What rewards are asked for and what they answered: ``B`` rows (completions), ``F`` functions."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LOST_WORKERS = 8
"""Rows of one function and step that may hang or kill a worker before the rows left are given up."""


class RewardContractError(ValueError):
    """A reward returned something that is not one float or ``None`` per completion."""


@dataclass(frozen=True)
class RewardSpec:
    """One entry of ``reward.functions``. Any object with these attributes does."""

    name: str
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """What a batch scored; lists over functions are in the order of :attr:`RewardRunner.names`."""

    values: list[list[float | None]]
    """``[B][F]``; ``None``: not scored by that function."""
    errors: list[int]
    """``[F]`` rows that failed by an exception or by the death of the worker."""
    timeouts: list[int]
    """``[F]`` rows that hung, or were given up after too many had."""
    first_traceback: dict[str, str]
    """Function -> what its first failing row of this batch raised."""
    failed_everywhere: list[str]
    """Functions that failed on every row of this (non-empty) batch."""

    @property
    def failures(self) -> list[int]:
        """``[F]`` errors and timeouts together: the metric ``rewards/<name>/errors``."""
        return [errors + timeouts for errors, timeouts in zip(self.errors, self.timeouts, strict=True)]


class Tally:
    """One function's results of one step; rows are filled in by several threads."""

    def __init__(self, name: str, rows: int):
        self.name, self.rows = name, rows
        self.values: list[float | None] = [None] * rows
        self.errors = self.timeouts = self.lost = 0
        self.traceback: str | None = None
        self.contract: str | None = None
        self._lock = threading.Lock()

    def failed(self) -> bool:
        return self.rows > 0 and self.errors + self.timeouts == self.rows

    def gives_up(self) -> bool:
        with self._lock:
            return self.lost >= MAX_LOST_WORKERS

    def record(self, outcome: tuple[str, Any], rows: Sequence[int]) -> None:
        kind, value = outcome
        with self._lock:
            if kind == "ok":
                for row, reward in zip(rows, value, strict=True):
                    self.values[row] = reward
            elif kind == "contract":
                self.contract = self.contract or value
            elif kind == "timeout":
                self.timeouts += len(rows)
                self.lost += 1
                self.traceback = self.traceback or "it did not return within reward.timeout_s"
            else:
                self.errors += len(rows)
                self.lost += kind == "died"
                self.traceback = self.traceback or (value if kind == "error" else f"its worker process {value}")

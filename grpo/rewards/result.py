"""The data types of scoring. Shapes: ``B`` rows (one completion each), ``F`` reward functions."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LOST_WORKERS = 8
"""After so many rows of one function and step have hung or killed their worker, the function is not called for the remaining rows."""


class RewardContractError(ValueError):
    """A reward returned something that is not one float or ``None`` per completion."""


@dataclass(frozen=True)
class RewardSpec:
    """One entry of ``reward.functions``. Any object with these attributes is accepted in its place."""

    name: str
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """The rewards of one batch and the failures of its functions. Lists follow :attr:`RewardRunner.names`."""

    values: list[list[float | None]]
    """``[B][F]``; ``None`` where the function gave no score."""
    errors: list[int]
    """``[F]`` rows in which the function raised an exception or killed its worker."""
    timeouts: list[int]
    """``[F]`` rows in which the function hung, or was no longer called because too many rows had hung before."""
    first_traceback: dict[str, str]
    """Function name -> traceback of the first row in this batch that failed."""
    failed_everywhere: list[str]
    """Names of the functions that failed on every row of this batch (which is not empty)."""

    @property
    def failures(self) -> list[int]:
        """``[F]`` errors plus timeouts: the metric ``rewards/<name>/errors``."""
        return [errors + timeouts for errors, timeouts in zip(self.errors, self.timeouts, strict=True)]


class FunctionResult:
    """The rewards of one function for the ``B`` rows of a step. Several threads record rows at the same time."""

    def __init__(self, name: str, num_rows: int):
        self.name, self.num_rows = name, num_rows
        self.values: list[float | None] = [None] * num_rows
        self.errors = self.timeouts = 0
        self.first_traceback: str | None = None
        self.contract_error: str | None = None
        self._lost_workers = 0
        self._lock = threading.Lock()

    @property
    def failures(self) -> int:
        return self.errors + self.timeouts

    def lost_too_many_workers(self) -> bool:
        with self._lock:
            return self._lost_workers >= MAX_LOST_WORKERS

    def record(self, outcome: tuple[str, Any], rows: Sequence[int]) -> None:
        """Store the outcome of one call (``grpo.rewards.worker`` lists the kinds) for the rows that the call scored."""
        kind, value = outcome
        with self._lock:
            if kind == "ok":
                for row, reward in zip(rows, value, strict=True):
                    self.values[row] = reward
            elif kind == "contract":
                self.contract_error = self.contract_error or value
            elif kind == "timeout":
                self.timeouts += len(rows)
                self._lost_workers += 1
                self.first_traceback = self.first_traceback or "it did not return within reward.timeout_s"
            else:
                self.errors += len(rows)
                self._lost_workers += kind == "died"
                self.first_traceback = self.first_traceback or (
                    value if kind == "error" else f"its worker process {value}"
                )

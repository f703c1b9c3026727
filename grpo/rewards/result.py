"""The data types of scoring. Shapes: ``B`` rows (one completion each), ``F`` reward functions."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
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
    function: Callable[..., Any] | None = None
    """The function itself; None: the one that ``name`` names."""


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
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> ``(sum, count)`` of what the functions gave to ``log_metric``."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Column -> ``[B]`` of what the functions gave to ``log_extra``; ``None`` for rows of calls that gave nothing."""

    @property
    def failures(self) -> list[int]:
        """``[F]`` errors plus timeouts: the metric ``rewards/<name>/errors``."""
        return [errors + timeouts for errors, timeouts in zip(self.errors, self.timeouts, strict=True)]


class FunctionResult:
    """The rewards of one function for the ``B`` rows of a step. Several threads record rows at the same time."""

    def __init__(self, name: str, num_rows: int):
        self.name, self.num_rows = name, num_rows
        self.values: list[float | None] = [None] * num_rows
        self.metrics: dict[str, tuple[float, float]] = {}
        self.extra: dict[str, list[Any]] = {}
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

    def record(self, outcome: tuple[Any, ...], rows: Sequence[int]) -> None:
        """Store the outcome of one call (``grpo.rewards.worker`` lists the kinds) for the rows that the call scored."""
        kind, value, *logged = outcome
        with self._lock:
            if kind == "ok":
                for row, reward in zip(rows, value, strict=True):
                    self.values[row] = reward
                for metrics, extra in logged:
                    _add(self.metrics, metrics)
                    for column, entries in extra.items():
                        kept = self.extra.setdefault(column, [None] * self.num_rows)
                        for row, entry in zip(rows, entries, strict=True):
                            kept[row] = entry
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

    def add_hint(self, completions: Sequence[Any]) -> None:
        """If every row failed as it does where text and messages are confused, add the remedy to the traceback."""
        if self.failures < self.num_rows or not self.first_traceback:
            return
        error = self.first_traceback.rstrip().rpartition("\n")[2]
        is_text = isinstance(completions[0], str)
        if is_text and _NEEDS_MESSAGES.search(error):
            hint = "completions are text here; if this reward reads lists of messages, set data.conversational=true"
        elif not is_text and _NEEDS_TEXT.search(error):
            hint = "completions are lists of messages here; if this reward reads text, set data.conversational=false"
        else:
            return
        self.first_traceback = f"{self.first_traceback.rstrip()} (hint: {hint})\n"


_NEEDS_MESSAGES = re.compile(
    r"string ind(ices must be integers|ex out of range)|'str' object has no attribute '(get|items|keys|values)'"
)
_NEEDS_TEXT = re.compile(r"\b(got|not) ['\"]?list\b|'list' object has no attribute ")


def sum_metrics(results: Sequence[FunctionResult]) -> dict[str, tuple[float, float]]:
    """``(sum, count)`` of each metric. As in TRL, functions that log the same name share it."""
    metrics: dict[str, tuple[float, float]] = {}
    for result in results:
        _add(metrics, result.metrics)
    return metrics


def join_columns(results: Sequence[FunctionResult]) -> dict[str, list[Any]]:
    """The extra columns of all functions; ``RewardContractError`` if two functions log the same one."""
    columns: dict[str, list[Any]] = {}
    for result in results:
        if shared := sorted(columns.keys() & result.extra.keys()):
            reason = f"called log_extra({shared[0]!r}, ...), as another reward did: choose another name"
            raise RewardContractError(f"reward {result.name!r} {reason}")
        columns |= result.extra
    return columns


def _add(metrics: dict[str, tuple[float, float]], more: Mapping[str, Sequence[float]]) -> None:
    for name, (total, count) in more.items():
        known_total, known_count = metrics.get(name, (0.0, 0.0))
        metrics[name] = (known_total + total, known_count + count)

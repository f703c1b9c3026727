"""The results of scoring a batch. Shapes: ``B`` rows (one completion each), ``F`` reward functions."""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.rewards.worker import Outcome, RewardContractError

_NEEDS_MESSAGES = re.compile(
    r"string ind(ices must be integers|ex out of range)|'str' object has no attribute '(get|items|keys|values)'"
)
_NEEDS_TEXT = re.compile(r"\b(got|not) ['\"]?list\b|'list' object has no attribute ")


@dataclass(frozen=True)
class RewardSpec:
    """One entry of ``reward.functions``. Any object with these attributes is accepted in its place."""

    name: str
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    """The function itself; None: the one that ``name`` names."""


class RewardResult:
    """The rewards of one batch and the failures of its functions, in the order of ``names``."""

    def __init__(self, names: Sequence[str], num_rows: int):
        self.names = names
        self.values: list[list[float | None]] = [[None] * len(names) for _ in range(num_rows)]
        """``[B][F]``; ``None`` where the function gave no score."""
        self.errors = [0] * len(names)
        """``[F]`` rows in which the function raised an exception or killed its worker."""
        self.timeouts = [0] * len(names)
        """``[F]`` rows in which it hung, or was no longer called because too many rows had hung before."""
        self.num_lost_workers = [0] * len(names)
        self.first_traceback: dict[str, str] = {}
        """Function name -> traceback of the first row that failed."""
        self.metrics: dict[str, tuple[float, float]] = {}
        """Name -> ``(sum, count)`` of what the functions gave to ``log_metric``. As in TRL they may share a name."""
        self.extra: dict[str, list[Any]] = {}
        """Column -> ``[B]`` of what they gave to ``log_extra``; ``None`` for rows of calls that gave nothing."""
        self._logged_by: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def failures(self) -> list[int]:
        """``[F]``: the metric ``rewards/<name>/errors``."""
        return [errors + timeouts for errors, timeouts in zip(self.errors, self.timeouts, strict=True)]

    @property
    def failed_everywhere(self) -> list[str]:
        """The functions that failed on every row."""
        return [name for name, count in zip(self.names, self.failures, strict=True) if count == len(self.values) > 0]

    def record(self, key: int, rows: range, outcome: Outcome) -> None:
        """Store the outcome of one call of function ``key``. Several threads do so at the same time."""
        name = self.names[key]
        with self._lock:
            if outcome.kind == "ok":
                self._record_values(key, rows, outcome)
            elif outcome.kind == "contract":
                raise RewardContractError(f"reward {name!r} {outcome.message}")
            elif outcome.kind == "timeout":
                self.timeouts[key] += len(rows)
                self.first_traceback.setdefault(name, "it did not return within reward.timeout_s")
            else:
                self.errors[key] += len(rows)
                self.first_traceback.setdefault(name, outcome.message)
            self.num_lost_workers[key] += outcome.kind in ("timeout", "died")

    def _record_values(self, key: int, rows: range, outcome: Outcome) -> None:
        for row, value in zip(rows, outcome.values, strict=True):
            self.values[row][key] = value
        for metric, (total, count) in outcome.logged.metrics.items():
            known_total, known_count = self.metrics.get(metric, (0.0, 0.0))
            self.metrics[metric] = (known_total + total, known_count + count)
        for column, entries in outcome.logged.extra.items():
            if self._logged_by.setdefault(column, key) != key:
                reason = f"called log_extra({column!r}, ...), as another reward did: choose another name"
                raise RewardContractError(f"reward {self.names[key]!r} {reason}")
            self.extra.setdefault(column, [None] * len(self.values))[rows.start : rows.stop] = entries

    def add_hints(self, completions: Sequence[Any]) -> None:
        """Where every row failed as it does if text and messages are confused, add the remedy to the traceback."""
        is_text = isinstance(completions[0], str)
        here, there, key = ("text", "lists of messages", "true") if is_text else ("lists of messages", "text", "false")
        for name in self.failed_everywhere:
            trace = self.first_traceback[name].rstrip()
            if (_NEEDS_MESSAGES if is_text else _NEEDS_TEXT).search(trace.rpartition("\n")[2]):
                hint = f"completions are {here} here; if this reward reads {there}, set data.conversational={key}"
                self.first_traceback[name] = f"{trace} (hint: {hint})\n"

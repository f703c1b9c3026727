"""The results of scoring a batch. Shapes: ``B`` rows (one completion each), ``F`` reward functions."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.rewards.worker import Outcome, RewardContractError

MAX_LOST_WORKERS = 8
"""After so many rows of one function and batch have hung or killed their worker, it is not called for the others."""
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


class FunctionResult:
    """The rewards of one function for the ``B`` rows of a batch, and its failures."""

    def __init__(self, name: str, num_rows: int):
        self.name = name
        self.values: list[float | None] = [None] * num_rows
        self.errors = self.timeouts = self.num_lost_workers = 0
        self.first_traceback = self.contract_error = ""
        self.metrics: dict[str, tuple[float, float]] = {}
        self.extra: dict[str, list[Any]] = {}

    @property
    def has_failed_everywhere(self) -> bool:
        return self.errors + self.timeouts == len(self.values) > 0

    def record(self, outcome: Outcome, rows: range) -> None:
        """Store the outcome of a call for the rows that it scored."""
        if outcome.kind == "ok":
            self.values[rows.start : rows.stop] = outcome.values
            add_metrics(self.metrics, outcome.logged.metrics)
            for column, entries in outcome.logged.extra.items():
                self.extra.setdefault(column, [None] * len(self.values))[rows.start : rows.stop] = entries
        elif outcome.kind == "contract":
            self.contract_error = self.contract_error or outcome.message
        elif outcome.kind == "timeout":
            self.timeouts += len(rows)
            self.num_lost_workers += 1
            self.first_traceback = self.first_traceback or "it did not return within reward.timeout_s"
        else:
            self.errors += len(rows)
            self.num_lost_workers += outcome.kind == "died"
            self.first_traceback = self.first_traceback or outcome.message

    def add_hint(self, completions: Sequence[Any]) -> None:
        """If every row failed as it does where text and messages are confused, add the remedy to the traceback."""
        error = self.first_traceback.rstrip().rpartition("\n")[2]
        is_text = isinstance(completions[0], str)
        if not self.has_failed_everywhere or not (_NEEDS_MESSAGES if is_text else _NEEDS_TEXT).search(error):
            return
        here, there, key = ("text", "lists of messages", "true") if is_text else ("lists of messages", "text", "false")
        hint = f"completions are {here} here; if this reward reads {there}, set data.conversational={key}"
        self.first_traceback = f"{self.first_traceback.rstrip()} (hint: {hint})\n"


class RewardResult:
    """The rewards of one batch and the failures of its functions, in the order of ``RewardRunner.names``."""

    def __init__(self, functions: Sequence[FunctionResult]):
        self.values = [list(row) for row in zip(*(f.values for f in functions), strict=True)]
        """``[B][F]``; ``None`` where the function gave no score."""
        self.errors = [f.errors for f in functions]
        """``[F]`` rows in which the function raised an exception or killed its worker."""
        self.timeouts = [f.timeouts for f in functions]
        """``[F]`` rows in which it hung, or was no longer called because too many rows had hung before."""
        self.failures = [f.errors + f.timeouts for f in functions]
        """``[F]``: the metric ``rewards/<name>/errors``."""
        self.first_traceback = {f.name: f.first_traceback for f in functions if f.first_traceback}
        """Function name -> traceback of the first row that failed."""
        self.failed_everywhere = [f.name for f in functions if f.has_failed_everywhere]
        self.metrics: dict[str, tuple[float, float]] = {}
        """Name -> ``(sum, count)`` of what the functions gave to ``log_metric``. As in TRL they may share a name."""
        self.extra: dict[str, list[Any]] = {}
        """Column -> ``[B]`` of what they gave to ``log_extra``; ``None`` for rows of calls that gave nothing."""
        for f in functions:
            add_metrics(self.metrics, f.metrics)
            if shared := sorted(self.extra.keys() & f.extra.keys()):
                reason = f"called log_extra({shared[0]!r}, ...), as another reward did: choose another name"
                raise RewardContractError(f"reward {f.name!r} {reason}")
            self.extra |= f.extra


def add_metrics(metrics: dict[str, tuple[float, float]], more: Mapping[str, Sequence[float]]) -> None:
    """Add ``(sum, count)`` of each metric."""
    for name, (total, count) in more.items():
        known_total, known_count = metrics.get(name, (0.0, 0.0))
        metrics[name] = (known_total + total, known_count + count)

"""Score completions with several reward functions. In a worker process none can hang or kill the training process.

``B`` rows (completions), ``F`` functions. Each function is called once with the whole batch, or row by row if it asks
for that. If the call raises, hangs or kills its worker, the function is called once per row, so that one bad row costs
one reward. The time per function and step is bounded: ``timeout_s`` for the batch, then ``timeout_s`` per row.
After ``MAX_LOST_WORKERS`` rows that hung or killed a worker, the remaining rows are skipped (``None``, counted as
timeouts). This module does not communicate between ranks: the training loop makes all ranks agree on a failure.
"""

import logging
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from grpo.rewards.functions import CLASSIFIER_PREFIX, FunctionInfo, check_columns, load_reward, unique_names
from grpo.rewards.pool import NotSent, WorkerLost, WorkerPool, pickled
from grpo.rewards.sandbox import Limits
from grpo.rewards.worker import OUTSIDE_TRAINING, Outcome, RewardContractError, RewardInputs, TrainerState, Worker
from grpo.system import printable

logger = logging.getLogger(__name__)

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


class RewardResult:
    """The rewards of one batch and the failures of its functions, in the order of ``names``."""

    def __init__(self, names: Sequence[str], num_rows: int):
        self.names = names
        self.values: list[list[float | None]] = [[None] * len(names) for _ in range(num_rows)]
        """``[B][F]``; ``None`` where the function gave no score."""
        self.errors = [0] * len(names)
        """``[F]`` rows in which the function raised an exception or killed its worker."""
        self.timeouts = [0] * len(names)
        """``[F]`` rows in which it hung, or was not called because too many had hung or killed their worker before."""
        self.num_hung_or_killed = [0] * len(names)
        self.first_traceback: dict[str, str] = {}
        """Function name -> the first failure: a traceback, or a sentence for a timeout or a death."""
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
            self.num_hung_or_killed[key] += outcome.kind in ("timeout", "died")

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
        """Add the remedy to the tracebacks of functions that failed on every row by confusing text and messages."""
        is_text = isinstance(completions[0], str)
        here, there, key = ("text", "lists of messages", "true") if is_text else ("lists of messages", "text", "false")
        for name in self.failed_everywhere:
            trace = self.first_traceback[name].rstrip()
            if (_NEEDS_MESSAGES if is_text else _NEEDS_TEXT).search(trace.rpartition("\n")[2]):
                hint = f"completions are {here} here; if this reward reads {there}, set data.conversational={key}"
                self.first_traceback[name] = f"{trace} (hint: {hint})\n"


Call = tuple[int, range]
"""A call of one function: its index, and the rows that it scores."""


class RewardRunner:
    """Runs the configured rewards. Each rank has one runner, which ends with :meth:`close` or by leaving its context.

    Args:
        functions: ``RewardSpec``s, or objects with ``name``, ``weight`` and ``args``. :meth:`check` loads them. A
            ``function`` that cannot be sent to a worker runs in this process; :attr:`notes` says so.
        timeout_s: time limit of one call, in seconds.
        num_workers: worker processes, 1 by default. More help if several functions are slow, or one that is called row
            by row.
        device: where ``classifier:`` rewards run, in this process.
    """

    def __init__(
        self, functions: Sequence[Any], *, timeout_s: float = 10.0, num_workers: int | None = None, device: Any = "cpu"
    ):
        from grpo.config.secrets import with_environment  # here: a worker imports this package, and needs no pydantic

        if not functions or not timeout_s > 0 or (num_workers is not None and num_workers < 1):
            raise ValueError("rewards need at least one function, and timeout_s and num_workers above 0")
        self.specs = []
        for f in functions:
            name = str(f.name).strip()
            args = with_environment(dict(f.args or {}), f"reward {name!r}")
            self.specs.append(RewardSpec(name, float(f.weight), args, getattr(f, "function", None)))
        self.names = unique_names([spec.name for spec in self.specs])
        self.weights = [spec.weight for spec in self.specs]
        self.timeout_s = float(timeout_s)
        self.notes: list[str] = []
        """Messages of :meth:`check` for the user, one line each."""
        self._device = device
        self._infos: list[FunctionInfo] = []
        self._pool, self._here = WorkerPool(num_workers or 1), Worker(is_process=False)
        self._row_by_row: set[int] = set()
        self._logged: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. A later call of :meth:`score` starts new ones."""
        self._pool.close()

    def check(self, columns: Collection[str] | None = None) -> None:
        """Load every function, so that a mistake shows early, and check that the rows have the columns that it needs.

        Raises:
            ValueError: in one line, for an unknown name, a file that cannot be imported, wrong arguments or a missing
                column.
        """
        if not self._infos:
            self._infos = [self._load(key) for key in range(len(self.specs))]
        if columns is not None:
            for name, info in zip(self.names, self._infos, strict=True):
                check_columns(name, info.needed_columns, columns)

    @property
    def source_files(self) -> dict[str, str]:
        """Name -> path of the files of the user's functions, once :meth:`check` has loaded them."""
        return {name: path for info in self._infos for name, path in info.source_files.items()}

    @property
    def classifier_models(self) -> list[str]:
        """The folders or Hub ids of ``classifier:`` rewards."""
        return [s.name.removeprefix(CLASSIFIER_PREFIX) for s in self.specs if s.name.startswith(CLASSIFIER_PREFIX)]

    def _load(self, key: int) -> FunctionInfo:
        spec = self.specs[key]
        if spec.name.startswith(CLASSIFIER_PREFIX):
            classifier = load_reward(spec.name)
            return self._here.load(key, spec.name, spec.args, classifier.to(self._device))
        seconds = spec.args.get("total_seconds", Limits.total_seconds)
        if spec.name == "python_tests" and isinstance(seconds, (int, float)) and seconds >= self.timeout_s:
            limit = f"reward.timeout_s = {self.timeout_s:g}"  # otherwise code that hangs scores None, not 0
            raise ValueError(f"reward 'python_tests': total_seconds = {seconds:g} must be less than {limit}")
        try:
            info = self._pool.load(key, spec.name, spec.args, pickled(spec.function))
        except NotSent as reason:
            here = "runs in this process, where a call that hangs cannot be stopped"
            self.notes.append(
                f"note: reward {spec.name!r} {here}, because it cannot be sent to a worker process ({reason})"
            )
            info = self._here.load(key, spec.name, spec.args, spec.function)
        except WorkerLost as lost:
            raise ValueError(f"reward {spec.name!r} cannot be loaded: its worker process {lost}") from None
        if info.row_by_row:
            self._row_by_row.add(key)
        return info

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState = OUTSIDE_TRAINING,
    ) -> RewardResult:
        """Score ``B`` completions. Every argument has ``B`` entries: strings or lists of messages, values per column,
        token lists.

        Raises:
            ValueError: if lengths differ or a column that a function needs is missing.
            RewardContractError: if a function returns something that is not a reward.
        """
        num_rows = len(completions)
        for name, values in {"prompts": prompts, "completion_ids": completion_ids, **columns}.items():
            if values is not None and len(values) != num_rows:
                raise ValueError(f"expected one value per completion ({num_rows}), got {len(values)} for {name}")
        self.check(columns)
        inputs = RewardInputs(prompts, completions, dict(columns), completion_ids, trainer_state)
        result = RewardResult(self.names, num_rows)
        if num_rows:
            self._pool.begin_step()
            try:
                self._score(inputs, result)
            except BaseException:  # after a Ctrl-C, threads would wait for workers whose result nobody reads
                self.close()
                raise
            result.add_hints(completions)
            self._log_failures(result)
        return result

    def _score(self, inputs: RewardInputs, result: RewardResult) -> None:
        """Call every function with the whole batch, all at the same time; then call those that failed once per row."""
        whole = [(key, range(len(inputs.completions))) for key in range(len(self.specs))]
        at_once = [call for call in whole if call[0] not in self._row_by_row]
        failed = self._run(at_once, inputs, result, job_of=lambda call: "all")
        again = [call for call in whole if call in failed or call[0] in self._row_by_row]
        rows = [(key, range(row, row + 1)) for key, rows in again for row in rows]
        lost = self._run(rows, inputs, result, job_of=lambda call: call[0])
        self._run(list(lost), inputs, result, job_of=lambda call: call)
        for (key, rows), outcome in failed.items():
            if outcome.kind == "timeout" and not self._infos[key].is_async and not result.timeouts[key]:
                self._row_by_row.add(key)
                logger.warning(
                    "reward %r takes longer than reward.timeout_s = %g s for a batch of %d, but not for any single "
                    "row: from now on it is called row by row (a larger timeout_s avoids that)",
                    *(self.names[key], self.timeout_s, len(rows)),
                )

    def _run(
        self, calls: Sequence[Call], inputs: RewardInputs, result: RewardResult, *, job_of: Callable[[Call], Any]
    ) -> dict[Call, Outcome]:
        """Make some calls and record their results. Returns the calls that have to be made again in smaller parts.

        Calls of async functions with the same ``job_of(call)`` run together in one worker.
        """
        jobs: dict[Any, list[Call]] = defaultdict(list)
        for call in calls:
            is_here, is_async = call[0] in self._here.functions, self._infos[call[0]].is_async
            jobs[is_here, job_of(call) if is_async else call].append(call)
        submit = self._pool.submit
        futures = [submit(self._do, self._pool, job, inputs, result) for (here, _), job in jobs.items() if not here]
        # In this process, while the workers run the other functions.
        failed = [self._do(self._here, job, inputs, result) for (here, _), job in jobs.items() if here]
        failed += [future.result() for future in futures]
        return {call: outcome for of_job in failed for call, outcome in of_job.items()}

    def _do(
        self, worker: Worker | WorkerPool, job: list[Call], inputs: RewardInputs, result: RewardResult
    ) -> dict[Call, Outcome]:
        """Make the calls of one job at once. Returns those that have to be made again."""
        key, rows = job[0]
        if len(job) == len(rows) == 1 and result.num_hung_or_killed[key] >= MAX_LOST_WORKERS:
            result.record(key, rows, Outcome("timeout"))
            return {}
        try:
            parts = {rows: inputs.pickled(rows) for _, rows in job}  # several functions may get the same rows
            outcomes = worker.run([(key, parts[rows]) for key, rows in job], self.timeout_s)
        except WorkerLost as lost:
            outcomes = [Outcome(lost.kind, message=f"its worker process {lost}")] * len(job)
            if len(job) > 1:  # it is not known which of the calls hung or killed the worker
                return dict(zip(job, outcomes, strict=True))
        failed = {}
        for (key, rows), outcome in zip(job, outcomes, strict=True):
            if len(rows) > 1 and outcome.kind not in ("ok", "contract"):
                failed[key, rows] = outcome
            else:
                result.record(key, rows, outcome)
        return failed

    def _log_failures(self, result: RewardResult) -> None:
        """Print a traceback once per run for each function and type of error."""
        for name, trace in result.first_traceback.items():
            kind = (name, trace.rstrip().rpartition("\n")[2].partition(":")[0])
            if kind not in self._logged:
                self._logged.add(kind)
                logger.warning(
                    "reward %r failed on %d of %d completions (logged once per run); the first failure:\n%s",
                    *(name, result.failures[self.names.index(name)], len(result.values), printable(trace)),
                )

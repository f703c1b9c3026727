"""Score completions with several reward functions. In a worker process none can hang or kill the training process.

``B`` rows (completions), ``F`` functions. A group is a run of neighbouring rows with equal prompts. Each function is
called once with the whole batch. If that call raises, hangs or kills its worker, the function is called once per group,
and where a group fails too, once per row, each with ``timeout_s``. After ``MAX_LOST_WORKERS`` groups that hung or
killed a worker, the other groups go straight to rows; after so many rows, the rest is not called. This module does not
communicate between ranks: the training loop makes all ranks agree on a failure.
"""

import contextlib
import copy
import itertools
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from grpo.rewards.functions import CLASSIFIER_PREFIX, FunctionInfo, check_columns, unique_names
from grpo.rewards.pool import WorkerLost, WorkerPool
from grpo.rewards.sandbox import Limits
from grpo.rewards.worker import OUTSIDE_TRAINING, Outcome, RewardContractError, TrainerState, Worker
from grpo.system import first_line, printable

logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 8
"""Most calls of one function and step, with a group or with a row each, that may hang or kill their worker. After so
many groups the others are called row by row; after so many rows the others are not called."""
BATCH, GROUP, ROW = range(3)
"""The levels of a call: with all rows, with those of one prompt, with one row."""
WAYS = {GROUP: "group by group", ROW: "row by row"}


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
        self.failures = [0] * len(names)
        """``[F]`` rows in which the function raised, hung, killed its worker, or was skipped after too many of them."""
        self.num_failed_environments = 0
        """Rows that no function got, because their environment has failed."""
        self.first_traceback: dict[str, str] = {}
        """Function name -> its failure in the first row: a traceback, or a sentence for a timeout or a death."""
        self.first_failed: dict[str, int] = {}
        """Function name -> that row."""
        self.metrics: dict[str, tuple[float, float]] = {}
        """Name -> ``(sum, count)`` of what the functions gave to ``log_metric``. As in TRL they may share a name."""
        self.extra: dict[str, list[Any]] = {}
        """Column -> ``[B]`` of what they gave to ``log_extra``; ``None`` for rows of calls that gave nothing."""
        self._logged_by: dict[str, int] = {}

    def record(self, key: int, rows: range, outcome: Outcome) -> None:
        """Store the outcome of the last call of function ``key`` with these rows."""
        name = self.names[key]
        if outcome.kind == "contract":
            raise RewardContractError(f"reward {name!r} {outcome.message}")
        if outcome.kind == "ok":
            self._store(key, rows, outcome)
            return

        self.failures[key] += len(rows)
        if rows.start <= self.first_failed.get(name, rows.start):
            self.first_failed[name] = rows.start
            self.first_traceback[name] = outcome.message

    def spread(self, is_scored: Sequence[bool]) -> "RewardResult":
        """The result for more rows, of which the functions got those where ``is_scored``; the others have no score."""
        spread = copy.copy(self)
        number = iter(range(len(self.values)))
        source = [next(number) if scored else None for scored in is_scored]
        spread.values = [[None] * len(self.names) if n is None else self.values[n] for n in source]
        spread.extra = {c: [None if n is None else entries[n] for n in source] for c, entries in self.extra.items()}
        return spread

    def _store(self, key: int, rows: range, outcome: Outcome) -> None:
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


@dataclass(frozen=True)
class Call:
    """A call of one function."""

    key: int
    """The index of the function."""
    rows: range
    level: int
    """BATCH, GROUP or ROW. A batch of one group is called as a group, and a group of one row as a row."""


class Batch:
    """The rows of one step, and the outcomes of calls with them. Several threads record outcomes at the same time.

    Args:
        values: argument of the functions -> ``[B]`` values.
    """

    def __init__(
        self,
        values: dict[str, Sequence[Any]],
        trainer_state: TrainerState,
        result: RewardResult,
    ):
        self.values = values
        self.trainer_state = trainer_state
        self.result = result
        self.rows = range(len(result.values))
        self.groups = _runs_of_equals(values["prompts"])
        self.num_lost: Counter[tuple[int, int]] = Counter()
        """``(key, level)`` -> calls that hung or killed their worker."""
        self.num_by_row: Counter[int] = Counter()
        """Key -> groups of several rows whose rows are called one by one."""
        self.slow: dict[int, int] = {}
        """Key -> the level of the smallest call that did not return in time, of those with several rows."""
        self.failed: dict[int, tuple[Call, Outcome]] = {}
        """Key -> the first call with several rows that raised, hung or killed its worker."""
        self._lock = threading.Lock()

    def pickled(self, rows: range) -> bytes:
        """The arguments for these rows, as a worker gets them. Columns may hold objects of the user's script."""
        part = {}
        for name, entries in self.values.items():
            part[name] = entries[rows.start : rows.stop]
        return cloudpickle.dumps((part, self.trainer_state))

    def calls(self, key: int, rows: range, level: int) -> list[Call]:
        """The calls of a function at a level that cover some rows."""
        parts = [rows]
        if level == GROUP:
            parts = self.groups
        elif level == ROW:
            parts = [range(row, row + 1) for row in rows]

        calls = []
        for part in parts:
            several = GROUP if part in self.groups else BATCH
            calls.append(Call(key, part, ROW if len(part) == 1 else several))
        return calls

    def record(self, call: Call, outcome: Outcome) -> bool:
        """Store the outcome of a call. Returns False if the function must be called again with fewer rows at once."""
        with self._lock:
            if outcome.kind in ("timeout", "died"):
                self.num_lost[call.key, call.level] += 1
            if call.level == ROW or outcome.kind in ("ok", "contract"):
                self.result.record(call.key, call.rows, outcome)
                return True

            if outcome.kind == "timeout":
                self.slow[call.key] = max(call.level, self.slow.get(call.key, BATCH))
            self.failed.setdefault(call.key, (call, outcome))
            if call.level == GROUP:
                self.num_by_row[call.key] += 1
            return False


def _runs_of_equals(prompts: Sequence[Any]) -> list[range]:
    runs = []
    start = 0
    for _, entries in itertools.groupby(prompts):
        stop = start + len(list(entries))
        runs.append(range(start, stop))
        start = stop
    return runs


class RewardRunner(contextlib.AbstractContextManager):
    """Runs the configured rewards. Each rank has one runner, which ends with :meth:`close` or by leaving its context.

    Args:
        functions: ``RewardSpec``s, or objects with ``name``, ``weight`` and ``args``. :meth:`check` loads them. A
            ``function`` that cannot be sent to a worker runs in this process; :attr:`notes` says so.
        timeout_s: time limit of one call, in seconds.
        num_workers: worker processes. More than one help if several functions are slow, or one that is called by row.
        device: where ``classifier:`` rewards run, in this process.
    """

    def __init__(
        self, functions: Sequence[Any], *, timeout_s: float = 10.0, num_workers: int | None = None, device: Any = "cpu"
    ):
        from grpo.config.secrets import with_environment  # here: a worker imports this package, and needs no pydantic

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
        self._pool = WorkerPool(num_workers or 1)
        self._here = Worker()
        self._levels = [BATCH] * len(self.specs)
        """The level at which each function is called first."""
        self._logged: set[tuple[str, ...]] = set()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. A later call of :meth:`score` starts new ones."""
        self._pool.close()

    def check(self, columns: Collection[str] | None = None) -> None:
        """Load every function, so that a mistake (``ValueError``) shows early, and check that its columns are there."""
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
        if spec.function is not None:
            info = self._load_object(key, spec)
        elif spec.name.startswith(CLASSIFIER_PREFIX):
            info = self._here.load(key, spec.name, spec.args, None)
        else:
            info = self._pool.load(key, spec.name, spec.args, None)
        if isinstance(info, ValueError):
            raise info

        if spec.name.startswith(CLASSIFIER_PREFIX):
            self._here.functions[key][0].model.to(self._device)
        seconds = spec.args.get("total_seconds", Limits.total_seconds)
        if spec.name == "python_tests" and seconds >= self.timeout_s:  # then code that hangs would score None, not 0
            raise ValueError(f"reward 'python_tests': total_seconds = {seconds:g} must be less than reward.timeout_s")
        if info.row_by_row:
            self._levels[key] = ROW
        return info

    def _load_object(self, key: int, spec: RewardSpec) -> FunctionInfo | ValueError:
        """Load a Python object in a worker, or in this process if it cannot be sent or not be loaded there."""
        try:
            own = cloudpickle.dumps(spec.function)
        except Exception as error:  # of any type: each object may raise its own
            reason = f"{type(error).__name__}: {first_line(error)}"
        else:
            info = self._pool.load(key, spec.name, spec.args, own)
            if not isinstance(info, ValueError):
                return info
            reason = first_line(info)

        info = self._here.load(key, spec.name, spec.args, spec.function)
        if not isinstance(info, ValueError):
            self.notes.append(runs_here(f"reward {spec.name!r}", reason))
        return info

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState = OUTSIDE_TRAINING,
    ) -> RewardResult:
        """Score ``B`` completions; every argument has ``B`` entries (``columns``: each of its values)."""
        values = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        values = {name: entries for name, entries in values.items() if entries is not None}
        num_rows = len(completions)
        for name, entries in values.items():
            if len(entries) != num_rows:
                raise ValueError(f"expected one value per completion ({num_rows}), got {len(entries)} for {name}")
        self.check(columns)

        result = RewardResult(self.names, num_rows)
        if num_rows:
            batch = Batch(values, trainer_state, result)
            self._pool.begin_step()
            try:
                self._score(batch)
            except BaseException:  # after a Ctrl-C, threads would wait for workers whose result nobody reads
                self.close()
                raise
            self._log_retries(batch)
            self._log_failures(result, prompts)
        return result

    def _score(self, batch: Batch) -> None:
        """Call every function with the whole batch, all at the same time; then those that failed with fewer rows."""
        waiting: list[list[Call]] = []
        at_once: dict[bool, list[Call]] = defaultdict(list)
        for key, info in enumerate(self._infos):
            calls = batch.calls(key, batch.rows, self._levels[key])
            if info.is_async:  # all async functions of one process are called at once
                at_once[key in self._here.functions] += calls
            else:
                waiting += [[call] for call in calls]
        waiting += at_once.values()

        while waiting:
            here = []
            futures = []
            for job in waiting:
                if job[0].key in self._here.functions:
                    here.append(job)
                else:
                    futures.append(self._pool.submit(self._do, self._pool, job, batch))
            waiting = []
            for job in here:  # in this process, while the workers run the other functions
                waiting += self._do(self._here, job, batch)
            for future in futures:
                waiting += future.result()

        for key, level in batch.slow.items():
            # If a row failed, that row was the reason. The calls of an async function wait at the same time.
            if not self._infos[key].is_async and not batch.result.failures[key]:
                self._levels[key] = level + 1
                logger.warning(
                    "reward %r is slower than reward.timeout_s: now called %s",
                    self.names[key],
                    WAYS[level + 1],
                )

    def _do(self, worker: Worker | WorkerPool, job: list[Call], batch: Batch) -> list[list[Call]]:
        """Make the calls of one job at once, and record their outcomes. Returns jobs for the rows of those that failed.

        Calls of an async function are one job, unless its worker was lost: they run one by one then, since it would
        not be known which of them hangs or kills its worker.
        """
        first = job[0]
        is_lost = False
        try:
            if batch.num_lost[first.key, first.level] >= MAX_LOST_WORKERS:
                reason = f"not called, as {MAX_LOST_WORKERS} calls before it hung or killed their worker"
                outcomes = [Outcome("skipped", message=reason)] * len(job)
            else:
                parts = {call.rows: batch.pickled(call.rows) for call in job}  # functions may get the same rows
                outcomes = worker.run([(call.key, parts[call.rows]) for call in job], self.timeout_s)
        except WorkerLost as lost:
            if len(job) > 1:
                batch.num_lost[first.key, first.level] += 1
                return [[call] for call in job]
            is_lost = True
            outcomes = [Outcome(lost.kind, message=f"its worker process {lost}")]

        jobs = []
        at_once: dict[int, list[Call]] = defaultdict(list)
        for call, outcome in zip(job, outcomes, strict=True):
            if batch.record(call, outcome):
                continue
            smaller = batch.calls(call.key, call.rows, call.level + 1)
            if self._infos[call.key].is_async and not is_lost:
                at_once[call.key] += smaller
            else:
                jobs += [[each] for each in smaller]
        return [*jobs, *at_once.values()]

    def _log_retries(self, batch: Batch) -> None:
        """Log once per run, for each function and type of error, that it failed with several rows at once.

        A reward that compares the completions of a prompt gives other values row by row.
        """
        for key, (call, outcome) in batch.failed.items():
            name = self.names[key]
            error = outcome.error or outcome.message
            kind = (name, error.partition(":")[0], "with several rows")
            is_slow = outcome.kind == "timeout" and self._levels[key] > call.level  # which another line has said
            if is_slow or kind in self._logged:
                continue
            self._logged.add(kind)

            ways = WAYS[call.level + 1]
            if call.level == BATCH and batch.num_by_row[key]:
                ways += f" (row by row for {batch.num_by_row[key]} of {len(batch.groups)} groups)"
            logger.warning(
                "reward %r %s on %d completions at once, and was called %s: %s",
                name,
                "raised" if outcome.error else "failed",
                len(call.rows),
                ways,
                printable(error),
            )

    def _log_failures(self, result: RewardResult, prompts: Sequence[Any]) -> None:
        """Print a traceback once per run for each function and type of error."""
        for name, trace in result.first_traceback.items():
            kind = (name, trace.rstrip().rpartition("\n")[2].partition(":")[0])
            if kind not in self._logged:
                self._logged.add(kind)
                logger.warning(
                    "reward %r failed on %d of %d completions (logged once per run); first for prompt %.200r:\n%s",
                    *(name, result.failures[self.names.index(name)], len(result.values)),
                    *(prompts[result.first_failed[name]], printable(trace)),
                )


def runs_here(what: str, reason: str) -> str:
    """The note that an object of the user's program could not be loaded in a worker process."""
    where = "runs in this process, where a hang cannot end"
    return f"note: {what} {where}: it cannot be sent to a worker process ({reason})"

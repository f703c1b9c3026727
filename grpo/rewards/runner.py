"""Score completions with several reward functions. In a worker process none can hang or kill the training process.

``B`` rows (completions), ``F`` functions. A group is a run of neighbouring rows with equal prompts.

Each function is called once with the whole batch. If that call raises, hangs or kills its worker,
the function is called once per group, and where a group fails too, once per row, each with
``timeout_s``. After ``MAX_LOST_WORKERS`` groups that hung or killed a worker, the other groups go
straight to rows; after so many rows, the rest is not called.

This module does not communicate between ranks: the training loop makes all ranks agree on a failure.
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
from grpo.system import printable

logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 8
"""Most calls of one function and step, with a group or with a row each, that may hang or kill their
worker. After so many groups the others are called row by row; after so many rows the others are not
called."""
BATCH, GROUP, ROW = range(3)
"""The levels of a call: with all rows, with those of one prompt, with one row."""
WAYS = {GROUP: "group by group", ROW: "row by row"}
SKIPPED = Outcome(
    "skipped",
    message=f"not called, as {MAX_LOST_WORKERS} calls before it hung or killed their worker",
)


@dataclass(frozen=True)
class RewardSpec:
    """One entry of ``reward.functions``. Any object with its name, weight and args is accepted in its place."""

    name: str
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    """The function itself; None: the one that ``name`` names."""


@dataclass(frozen=True)
class Call:
    """A call of one function."""

    key: int
    """The index of the function."""
    rows: range
    level: int
    """BATCH, GROUP or ROW. A batch of one group is called as a group, and a group of one row as a row."""


class RewardResult:
    """The rewards of one batch and the failures of its functions, in the order of ``names``."""

    def __init__(self, names: Sequence[str], num_rows: int, groups: Sequence[range]):
        self.names = names
        self.groups = groups
        no_scores = [None] * len(names)
        self.values: list[list[float | None]] = [no_scores.copy() for _ in range(num_rows)]
        """``[B][F]``; ``None`` where the function gave no score."""
        self.failures = [0] * len(names)
        """``[F]`` rows in which the function raised, hung, killed its worker, or was skipped after too many of them."""
        self.num_failed_environments = 0
        """Rows that no function got, because their environment has failed."""
        self.num_lost = Counter()
        """``(key, level)`` -> calls that hung or killed their worker."""
        self.retried = defaultdict(list)
        """Function -> ``(call, outcome)`` of each call with several rows that failed or was skipped, in order."""
        self.first_traceback: dict[str, str] = {}
        """Function name -> its failure in the first row: a traceback, or a sentence for a timeout or a death."""
        self.first_failed: dict[str, int] = {}
        """Function name -> that row."""
        self.metrics: dict[str, tuple[float, float]] = {}
        """Name -> ``(sum, count)`` of what the functions gave to ``log_metric``. As in TRL they may share a name."""
        self.extra: dict[str, list[Any]] = {}
        """Column -> ``[B]`` of what they gave to ``log_extra``; ``None`` for rows of calls that gave nothing."""
        self._logged_by: dict[str, int] = {}
        self._lock = threading.Lock()

    def calls(self, key: int, rows: range, level: int) -> list[Call]:
        """The calls of a function at a level that cover some rows: all rows, or at the level ROW those of a group."""
        if level == BATCH and len(self.groups) > 1:
            return [Call(key, rows, BATCH)]

        parts = self.groups
        if level == ROW:
            parts = [range(row, row + 1) for row in rows]
        calls = []
        for part in parts:
            part_level = ROW if len(part) == 1 else GROUP
            calls.append(Call(key, part, part_level))
        return calls

    def record(self, call: Call, outcome: Outcome) -> bool:
        """Store the outcome of a call. Several threads do so at the same time.

        Returns False if the function must be called again with fewer rows at once.
        """
        key = call.key
        name = self.names[key]
        with self._lock:
            if outcome.kind == "contract":
                raise RewardContractError(f"reward {name!r} {outcome.message}")
            if outcome.kind == "ok":
                self._store(key, call.rows, outcome)
                return True

            if outcome.kind in ("timeout", "died"):
                self.num_lost[key, call.level] += 1
            if call.level == ROW:
                self.failures[key] += 1
                row = call.rows.start
                if row <= self.first_failed.get(name, row):
                    self.first_failed[name] = row
                    self.first_traceback[name] = outcome.message
                return True

            self.retried[key].append((call, outcome))
            return False

    def spread(self, is_scored: Sequence[bool]) -> "RewardResult":
        """Return the values and extra columns for more rows: those where ``is_scored`` is False have no score."""
        spread = copy.copy(self)
        values = iter(self.values)
        spread.values = []
        for scored in is_scored:
            row = next(values) if scored else [None] * len(self.names)
            spread.values.append(row)
        spread.extra = {}
        for column, entries in self.extra.items():
            entry = iter(entries)
            spread.extra[column] = [next(entry) if scored else None for scored in is_scored]
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
        self,
        functions: Sequence[Any],
        *,
        timeout_s: float = 10.0,
        num_workers: int | None = None,
        device: Any = "cpu",
    ):
        # Imported here: a worker imports this package, and needs no pydantic.
        from grpo.config.secrets import with_environment

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

    def check(
        self,
        columns: Collection[str] | None = None,
        source: str = "the rows",
    ) -> None:
        """Load every function, so that a mistake (``ValueError``) shows early, and check that its columns are there."""
        if not self._infos:
            self._infos = [self._load(key) for key in range(len(self.specs))]
        if columns is not None:
            for name, info in zip(self.names, self._infos, strict=True):
                check_columns(name, info.needed_columns, columns, source)

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
        is_classifier = spec.name.startswith(CLASSIFIER_PREFIX)
        function = (spec.name, spec.args, spec.function)
        if is_classifier:
            info = self._here.load(key, *function)
        else:
            info = self._pool.load_or_here(
                self._here,
                self.notes,
                f"reward {spec.name!r}",
                key,
                *function,
            )
        if isinstance(info, ValueError):
            raise info

        if is_classifier:
            self._here.functions[key][0].model.to(self._device)
        seconds = spec.args.get("total_seconds", Limits.total_seconds)
        if spec.name == "python_tests" and seconds >= self.timeout_s:  # then code that hangs would score None, not 0
            raise ValueError(f"reward 'python_tests': total_seconds = {seconds:g} must be less than reward.timeout_s")
        if info.row_by_row:
            self._levels[key] = ROW
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
        values = {**columns, "prompts": prompts, "completions": completions}
        if completion_ids is not None:
            values["completion_ids"] = completion_ids
        num_rows = len(completions)
        for name, entries in values.items():
            if len(entries) != num_rows:
                raise ValueError(f"expected one value per completion ({num_rows}), got {len(entries)} for {name}")
        self.check(columns)

        def pickled(rows: range) -> bytes:  # columns may hold objects of the user's script
            part = {name: entries[rows.start : rows.stop] for name, entries in values.items()}
            return cloudpickle.dumps((part, trainer_state))

        result = RewardResult(self.names, num_rows, _runs_of_equals(prompts))
        if num_rows:
            self._pool.begin_step()
            try:
                self._score(pickled, result)
            except BaseException:  # after a Ctrl-C, threads would wait for workers whose result nobody reads
                self.close()
                raise
            self._log_retries(result)
            self._log_failures(result, prompts)
        return result

    def _score(self, pickled: Callable[[range], bytes], result: RewardResult) -> None:
        """Call every function with the whole batch, all at the same time; then those that failed with fewer rows."""
        all_rows = range(len(result.values))
        waiting = []
        async_here = []
        async_in_workers = []
        for key, info in enumerate(self._infos):
            calls = result.calls(key, all_rows, self._levels[key])
            if not info.is_async:
                waiting += [[call] for call in calls]
            elif key in self._here.functions:
                async_here += calls
            else:
                async_in_workers += calls
        # All async functions of one process are called at once.
        waiting += [job for job in (async_here, async_in_workers) if job]
        while waiting:
            here = []
            futures = []
            for job in waiting:
                if job[0].key in self._here.functions:
                    here.append(job)
                else:
                    futures.append(self._pool.submit(self._do, self._pool, job, pickled, result))
            waiting = []
            for job in here:  # in this process, while the workers run the other functions
                waiting += self._do(self._here, job, pickled, result)
            for future in futures:
                waiting += future.result()

    def _do(
        self,
        worker: Worker | WorkerPool,
        calls: list[Call],
        pickled: Callable[[range], bytes],
        result: RewardResult,
    ) -> list[list[Call]]:
        """Make the calls of one job at once, and record their outcomes.

        Returns jobs for the rows of those that failed. The calls of all async functions are one job,
        unless their worker was lost: they run one by one then, since it would not be known which of
        them hangs or kills its worker.
        """
        outcomes = dict.fromkeys(calls, SKIPPED)
        made = []
        for call in calls:
            if result.num_lost[call.key, call.level] < MAX_LOST_WORKERS:
                made.append(call)
        is_lost = False
        if made:
            arguments = [(call.key, pickled(call.rows)) for call in made]
            try:
                found = worker.run(arguments, self.timeout_s)
            except WorkerLost as lost:
                if len(calls) > 1:
                    # Any of them may be the cause, so that each counts a lost worker.
                    result.num_lost.update({(call.key, call.level) for call in made})
                    return [[call] for call in calls]
                is_lost = True
                found = [Outcome(lost.kind, message=f"its worker process {lost}")]
            outcomes.update(zip(made, found, strict=True))

        at_once = []
        one_by_one = []
        for call, outcome in outcomes.items():
            if result.record(call, outcome):
                continue
            smaller = result.calls(call.key, call.rows, call.level + 1)
            if self._infos[call.key].is_async and not is_lost:
                at_once += smaller
            else:
                one_by_one += [[part] for part in smaller]
        return [*one_by_one, at_once] if at_once else one_by_one

    def _log_retries(self, result: RewardResult) -> None:
        """Log that functions failed with several rows at once: once per run, function and type of error.

        A reward that compares the completions of a prompt gives other values row by row.
        """
        for key, retried in result.retried.items():
            name = self.names[key]
            call, outcome = retried[0]
            # If no single row failed, only the number of rows was too slow. The calls of an async
            # function share one event loop, so that a late one shows nothing about the others.
            is_slow = outcome.kind == "timeout" and not result.failures[key]
            if is_slow and not self._infos[key].is_async:
                late = [tried for tried, found in retried if found.kind == "timeout"]
                num_late_groups = sum(tried.level == GROUP for tried in late)
                # One late group of several may have had a slow moment.
                are_all_late = num_late_groups == len(result.groups)
                self._levels[key] = ROW if are_all_late else GROUP
                logger.warning(
                    "reward %r is slower than reward.timeout_s: now called %s",
                    name,
                    WAYS[self._levels[key]],
                )
                continue

            error = outcome.error or outcome.message
            kind = (name, error.partition(":")[0], "with several rows")
            if kind in self._logged:
                continue
            self._logged.add(kind)
            way = WAYS[call.level + 1]
            num_by_row = sum(tried.level == GROUP for tried, _ in retried)
            if call.level == BATCH and num_by_row:
                way += f" (row by row for {num_by_row} of {len(result.groups)} groups)"
            logger.warning(
                "reward %r %s on %d completions at once, and was called %s: %s",
                name,
                "raised" if outcome.error else "failed",
                len(call.rows),
                way,
                printable(error),
            )

    def _log_failures(self, result: RewardResult, prompts: Sequence[Any]) -> None:
        """Print a traceback once per run for each function and type of error."""
        for name, trace in result.first_traceback.items():
            last_line = trace.rstrip().rpartition("\n")[2]
            kind = (name, last_line.partition(":")[0])
            if kind in self._logged:
                continue
            self._logged.add(kind)
            logger.warning(
                "reward %r failed on %d of %d completions (logged once per run); first for prompt %.200r:\n%s",
                name,
                result.failures[self.names.index(name)],
                len(result.values),
                prompts[result.first_failed[name]],
                printable(trace),
            )

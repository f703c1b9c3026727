"""Score completions with several reward functions. In a worker process none can hang or kill the training process.

``B`` rows (completions), ``F`` functions. Each function is called once with the whole batch, or row by row if it asks
for that. If the call raises, hangs or kills its worker, the function is called once per row, with ``timeout_s`` each.
After ``MAX_LOST_WORKERS`` rows that hung or killed a worker, it is not called for the rest. This module does not
communicate between ranks: the training loop makes all ranks agree on a failure.
"""

import contextlib
import copy
import logging
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.rewards.functions import CLASSIFIER_PREFIX, FunctionInfo, check_columns, unique_names
from grpo.rewards.pool import WorkerLost, WorkerPool
from grpo.rewards.sandbox import Limits
from grpo.rewards.worker import OUTSIDE_TRAINING, Outcome, RewardContractError, TrainerState, Worker
from grpo.system import first_line, printable

logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 8
"""After so many rows of one function and batch have hung or killed their worker, it is not called for the others."""


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
        self.num_lost_workers = [0] * len(names)
        self.slow: list[int] = []
        """The functions that did not return within the time limit when they were called with all rows."""
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

    def record(self, key: int, rows: range, outcome: Outcome) -> None:
        """Store the outcome of one call of function ``key``. Several threads do so at the same time."""
        with self._lock:
            if outcome.kind == "ok":
                self._store(key, rows, outcome)
            elif outcome.kind == "contract":
                raise RewardContractError(f"reward {self.names[key]!r} {outcome.message}")
            else:
                self.failures[key] += len(rows)
                reason = outcome.message or "it did not return within reward.timeout_s"
                if rows.start <= self.first_failed.get(self.names[key], rows.start):
                    self.first_failed[self.names[key]], self.first_traceback[self.names[key]] = rows.start, reason
                self.num_lost_workers[key] += outcome.kind != "error"

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


Call = tuple[int, range]
"""A call of one function: its index, and the rows that it scores."""


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
        self._pool, self._here = WorkerPool(num_workers or 1), Worker(is_process=False)
        self._row_by_row: set[int] = set()
        self._logged: set[tuple[str, str]] = set()

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
        is_classifier, own = spec.name.startswith(CLASSIFIER_PREFIX), None
        worker = self._here if is_classifier else self._pool
        try:
            if spec.function is not None:
                import dill

                own = dill.dumps(spec.function, recurse=True)
        except Exception as error:  # of any type: each object may raise its own
            reason = f"it cannot be sent to a worker process ({type(error).__name__}: {first_line(error)})"
            self.notes.append(f"note: reward {spec.name!r} runs in this process, where a hang cannot end: {reason}")
            worker, own = self._here, spec.function
        info = worker.load(key, spec.name, spec.args, own)
        if isinstance(info, ValueError):
            raise info
        if is_classifier:
            self._here.functions[key][0].model.to(self._device)
        seconds = spec.args.get("total_seconds", Limits.total_seconds)
        if spec.name == "python_tests" and seconds >= self.timeout_s:  # then code that hangs would score None, not 0
            raise ValueError(f"reward 'python_tests': total_seconds = {seconds:g} must be less than reward.timeout_s")
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
        """Score ``B`` completions; every argument has ``B`` entries (``columns``: each of its values)."""
        values = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        values = {name: entries for name, entries in values.items() if entries is not None}
        num_rows = len(completions)
        for name, entries in values.items():
            if len(entries) != num_rows:
                raise ValueError(f"expected one value per completion ({num_rows}), got {len(entries)} for {name}")
        self.check(columns)

        def pickled(rows: range) -> bytes:
            part = {name: entries[rows.start : rows.stop] for name, entries in values.items()}
            return pickle.dumps((part, trainer_state))

        result = RewardResult(self.names, num_rows)
        if num_rows:
            self._pool.begin_step()
            try:
                self._score(pickled, result)
            except BaseException:  # after a Ctrl-C, threads would wait for workers whose result nobody reads
                self.close()
                raise
            self._log_failures(result, prompts)
        return result

    def _score(self, pickled: Callable[[range], bytes], result: RewardResult) -> None:
        """Call every function with the whole batch, all at the same time; then call those that failed once per row."""
        rows = range(len(result.values))
        jobs: dict[Any, list[Call]] = defaultdict(list)
        for key, info in enumerate(self._infos):
            if key not in self._row_by_row:  # all async functions of one process are called at once
                jobs[key in self._here.functions if info.is_async else (key,)].append((key, rows))
        waiting = [*jobs.values(), *(job for key in self._row_by_row for job in self._by_row(key, rows))]
        while waiting:
            here = [job for job in waiting if job[0][0] in self._here.functions]
            others = [job for job in waiting if job[0][0] not in self._here.functions]
            futures = [self._pool.submit(self._do, self._pool, job, pickled, result) for job in others]
            # In this process, while the workers run the other functions.
            again = [self._do(self._here, job, pickled, result) for job in here]
            waiting = [job for jobs in (*again, *(future.result() for future in futures)) for job in jobs]
        for key in result.slow:
            if not self._infos[key].is_async and not result.failures[key]:
                self._row_by_row.add(key)
                logger.warning("reward %r is slower than reward.timeout_s: now called row by row", self.names[key])

    def _by_row(self, key: int, rows: range) -> list[list[Call]]:
        """The jobs that call a function once per row: one job per row, or all rows at once if it is async."""
        calls = [(key, range(row, row + 1)) for row in rows]
        return [calls] if self._infos[key].is_async else [[call] for call in calls]

    def _do(
        self, worker: Worker | WorkerPool, job: list[Call], pickled: Callable[[range], bytes], result: RewardResult
    ) -> list[list[Call]]:
        """Make the calls of one job at once, and record their results. Returns jobs for what has to be called again."""
        key, rows = job[0]
        if len(job) == len(rows) == 1 and result.num_lost_workers[key] >= MAX_LOST_WORKERS:
            result.record(key, rows, Outcome("timeout"))
            return []
        is_lost, again = False, []
        try:
            parts = {rows: pickled(rows) for _, rows in job}  # several functions may get the same rows
            outcomes = worker.run([(key, parts[rows]) for key, rows in job], self.timeout_s)
        except WorkerLost as lost:
            is_lost, outcomes = True, [Outcome(lost.kind, message=f"its worker process {lost}")] * len(job)
        for (key, rows), outcome in zip(job, outcomes, strict=True):
            if len(rows) > 1 and outcome.kind not in ("ok", "contract"):
                again += self._by_row(key, rows)
                result.slow += [key] * (outcome.kind == "timeout")
            elif is_lost and len(job) > 1:  # it is not known which of the calls hung or killed the worker
                again.append([(key, rows)])
            else:
                result.record(key, rows, outcome)
        return again

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

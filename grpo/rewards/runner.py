"""Score completions with several reward functions. In a worker process none can hang or kill the training process.

``B`` rows (completions), ``F`` functions. A group is a run of neighbouring rows with equal prompts.

Each function is called once with the whole batch. If that call raises, hangs or kills its worker,
the function is called once per group, and where a group fails too, once per row, each with
``timeout_s``. After ``MAX_LOST_WORKERS`` groups that hung or killed a worker, the other groups go
straight to rows; after so many rows, the rest is not called.

A function that takes ``environments`` is called in each process where environments of the batch
live, with the rows of that process.

This module does not communicate between ranks: the training loop makes all ranks agree on a failure.
"""

import contextlib
import itertools
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from grpo.rewards.calls import OUTSIDE_TRAINING, LoadedReward, Place, RewardContractError, TrainerState
from grpo.rewards.functions import CLASSIFIER_PREFIX, ENVIRONMENTS, FunctionInfo, check_columns, unique_names
from grpo.rewards.sandbox import Limits
from grpo.system import printable
from grpo.workers import Answer, Here, Pool, Request, Worker

logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 8
"""Most calls of one function and step, with a group or with a row each, that may hang or kill their
worker. After so many groups the others are called row by row; after so many rows the others are not
called."""
BATCH, GROUP, ROW = range(3)
"""The levels of a call: with all rows, with those of one prompt, with one row."""
WAYS = {GROUP: "group by group", ROW: "row by row"}
SKIPPED = Answer(
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

    function: int
    rows: tuple[int, ...]
    level: int
    """BATCH, GROUP or ROW. A batch of one group is called as a group, and a group of one row as a row."""
    places: tuple[Worker | Here, ...]
    """The workers that may make it."""


Job = list[Call]
"""Calls that are made at once."""


class RewardResult:
    """The rewards of one batch and the failures of its functions, in the order of ``names``."""

    def __init__(self, names: Sequence[str], prompts: Sequence[Any]):
        self.names = names
        self.values: list[list[float | None]] = [[None] * len(names) for _ in prompts]
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

        self.groups: list[list[int]] = []
        """The rows of each group."""
        for _, entries in itertools.groupby(enumerate(prompts), key=lambda entry: entry[1]):
            self.groups.append([row for row, _ in entries])
        self.num_lost = Counter()
        """``(function, level)`` -> calls that hung or killed their worker."""
        self.retried = defaultdict(list)
        """Function -> ``(call, answer)`` of each call with several rows that failed or was skipped, in order."""
        self._logged_by: dict[str, int] = {}
        # Several threads make calls and record their answers at the same time.
        self._lock = threading.Lock()

    def calls(self, function: int, rows: Sequence[int], level: int, places: Sequence[Any]) -> list[Call]:
        """The calls of a function at a level that cover some rows."""
        if level == ROW:
            parts = [[row] for row in rows]
        else:
            wanted = set(rows)
            parts = [wanted.intersection(group) for group in self.groups]
        parts = [tuple(sorted(part)) for part in parts if part]
        if level == BATCH and len(parts) > 1:
            return [Call(function, tuple(rows), BATCH, places)]
        return [Call(function, part, ROW if len(part) == 1 else GROUP, places) for part in parts]

    def record(self, call: Call, answer: Answer) -> bool:
        """Store the answer to a call. Returns False if the function must be called again with fewer rows at once."""
        name = self.names[call.function]
        with self._lock:
            if isinstance(answer.value, RewardContractError):
                raise RewardContractError(f"reward {name!r} {answer.value}")
            if answer.kind == "ok":
                self._store(call, *answer.value)
                return True

            if answer.kind in ("timeout", "died"):
                self.num_lost[call.function, call.level] += 1
            if call.level != ROW:
                self.retried[call.function].append((call, answer))
                return False

            self.failures[call.function] += 1
            (row,) = call.rows
            if row <= self.first_failed.get(name, row):
                self.first_failed[name] = row
                self.first_traceback[name] = answer.trace or answer.message
            return True

    def _store(self, call: Call, values: list[float | None], logged: Any) -> None:
        for row, value in zip(call.rows, values, strict=True):
            self.values[row][call.function] = value
        for metric, (total, count) in logged.metrics.items():
            known_total, known_count = self.metrics.get(metric, (0.0, 0.0))
            self.metrics[metric] = (known_total + total, known_count + count)
        for column, entries in logged.extra.items():
            if self._logged_by.setdefault(column, call.function) != call.function:
                reason = f"called log_extra({column!r}, ...), as another reward did: choose another name"
                raise RewardContractError(f"reward {self.names[call.function]!r} {reason}")
            of_rows = self.extra.setdefault(column, [None] * len(self.values))
            for row, entry in zip(call.rows, entries, strict=True):
                of_rows[row] = entry


@dataclass(frozen=True)
class Batch:
    """The inputs of one call of :meth:`RewardRunner.score`, and its result so far."""

    inputs: Mapping[str, Sequence[Any]]
    trainer_state: TrainerState
    result: RewardResult

    def pickled(self, rows: Sequence[int]) -> bytes:
        """The inputs of some rows, for :meth:`LoadedReward.score`."""
        part = {name: [entries[row] for row in rows] for name, entries in self.inputs.items()}
        return cloudpickle.dumps((part, self.trainer_state))  # columns may hold objects of the user's script


class RewardRunner(contextlib.AbstractContextManager):
    """Runs the configured rewards. Each rank has one runner, which ends with :meth:`close` or by leaving its context.

    Args:
        functions: ``RewardSpec``s, or objects with ``name``, ``weight`` and ``args``. :meth:`check` loads them. A
            ``function`` that cannot be sent to a worker runs in this process; :attr:`notes` says so.
        timeout_s: time limit of one call, in seconds.
        num_workers: worker processes. More than one help if several functions are slow, or one that is called by row.
        device: where ``classifier:`` rewards run, in this process.
        environments: the :class:`grpo.turns.tools.Tools` of the run, where functions that take ``environments`` run.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        *,
        timeout_s: float = 10.0,
        num_workers: int | None = None,
        device: Any = "cpu",
        environments: Any = None,
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
        self._device = device
        self._environments = environments
        self._infos: list[FunctionInfo] = []
        self._pool = Pool(num_workers or 1)
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
            self._infos = [self._load(number) for number in range(len(self.specs))]
        if columns is not None:
            for name, info in zip(self.names, self._infos, strict=True):
                check_columns(name, info.needed_columns, columns, source)

    @property
    def notes(self) -> list[str]:
        """Messages of :meth:`check` for the user, one line each."""
        return self._pool.notes

    @property
    def source_files(self) -> dict[str, str]:
        """Name -> path of the files of the user's functions, once :meth:`check` has loaded them."""
        return {name: path for info in self._infos for name, path in info.source_files.items()}

    @property
    def classifier_models(self) -> list[str]:
        """The folders or Hub ids of ``classifier:`` rewards."""
        return [s.name.removeprefix(CLASSIFIER_PREFIX) for s in self.specs if s.name.startswith(CLASSIFIER_PREFIX)]

    @property
    def _has_environments(self) -> bool:
        return self._environments is not None and bool(self._environments.environments)

    def _load(self, number: int) -> FunctionInfo:
        spec = self.specs[number]
        key = _key(number)
        what = f"reward {spec.name!r}"
        is_classifier = spec.name.startswith(CLASSIFIER_PREFIX)
        source = (LoadedReward, spec.name, spec.args)
        info = self._pool.load(what, key, *source, user_object=spec.function, here=is_classifier)
        if is_classifier:
            self._pool.here.ask([Request(key, "to", (self._device,))], self.timeout_s)
        if info.takes_environments and self._has_environments:
            # It stays loaded here, for rows without an environment.
            environments = self._environments
            environments.pool.load(what, key, *source, user_object=spec.function)
            environments.keep_groups_together()
            if environments.live_in_workers and key in environments.pool.keys_here:
                raise ValueError(
                    f"{what} takes `environments`, which live in worker processes, and cannot be sent there: "
                    "put what it needs into the environment, and its reward into a method get_reward()"
                )

        seconds = spec.args.get("total_seconds", Limits.total_seconds)
        if spec.name == "python_tests" and seconds >= self.timeout_s:  # then code that hangs would score None, not 0
            raise ValueError(f"{what}: total_seconds = {seconds:g} must be less than reward.timeout_s")
        if info.row_by_row:
            self._levels[number] = ROW
        return info

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState = OUTSIDE_TRAINING,
        is_scored: Sequence[bool] | None = None,
    ) -> RewardResult:
        """Score ``B`` completions; every argument has ``B`` entries (``columns``: each of its values).

        ``is_scored``: False for completions that no function gets. Default: all True.
        """
        inputs = {**columns, "prompts": prompts, "completions": completions}
        if completion_ids is not None:
            inputs["completion_ids"] = completion_ids
        num_rows = len(completions)
        for name, entries in inputs.items():
            if len(entries) != num_rows:
                raise ValueError(f"expected one value per completion ({num_rows}), got {len(entries)} for {name}")
        self.check(columns)

        result = RewardResult(self.names, prompts)
        rows = [row for row in range(num_rows) if is_scored is None or is_scored[row]]
        if rows:
            self._pool.begin_step()
            jobs = self._first_jobs(result, rows, columns.get(ENVIRONMENTS))
            try:
                while jobs:
                    jobs = self._run(jobs, Batch(inputs, trainer_state, result))
            except BaseException:  # after a Ctrl-C, threads would wait for workers whose result nobody reads
                self.close()
                raise
            self._log_retries(result)
            self._log_failures(result, prompts)
        return result

    def _first_jobs(
        self,
        result: RewardResult,
        rows: Sequence[int],
        environments: Sequence[Place | None] | None,
    ) -> list[Job]:
        """Calls of every function with the whole batch. Jobs run at the same time."""
        jobs = []
        all_async = defaultdict(list)
        for number, info in enumerate(self._infos):
            for places, of_place in self._rows_by_place(number, rows, environments).items():
                calls = result.calls(number, of_place, self._levels[number], places)
                if info.is_async:
                    all_async[places] += calls
                else:
                    jobs += [[call] for call in calls]
        # All async functions of one process are called at once.
        return jobs + list(all_async.values())

    def _rows_by_place(
        self,
        number: int,
        rows: Sequence[int],
        environments: Sequence[Place | None] | None,
    ) -> dict[tuple[Worker | Here, ...], Sequence[int]]:
        """Return the rows of a function by the workers that may be called with them."""
        key = _key(number)
        if self._infos[number].takes_environments and self._has_environments:
            rows_of = defaultdict(list)
            for row in rows:
                worker = self._environments.worker_of(environments[row])
                rows_of[(worker,)].append(row)
            return rows_of
        places = tuple(self._pool.workers)
        if key in self._pool.keys_here:
            places = (self._pool.here,)
        return {places: rows}

    def _run(self, jobs: list[Job], batch: Batch) -> list[Job]:
        """Run jobs, those of different workers at the same time. Returns jobs for the rows of calls that failed."""
        by_places = defaultdict(list)
        for job in jobs:
            by_places[job[0].places].append(job)
        # Jobs of this process keep this thread busy, while the workers run the others.
        in_order = sorted(by_places, key=lambda places: isinstance(places[0], Here))
        futures = []
        for places in in_order:
            remaining = iter(by_places[places])  # each of the workers takes the next
            for worker in places:
                futures.append(worker.submit(self._work, worker, remaining, batch))
        return [job for future in futures for job in future.result()]

    def _work(self, worker: Worker | Here, jobs: Iterable[Job], batch: Batch) -> list[Job]:
        following = []
        for job in jobs:
            following += self._do(worker, job, batch)
        return following

    def _do(self, worker: Worker | Here, job: Job, batch: Batch) -> list[Job]:
        """Make the calls of one job at once, and record the answers. Returns jobs for the rows of those that failed.

        The calls of all async functions are one job, unless their worker was lost: they run one by one then, since it
        would not be known which of them hangs or kills its worker.
        """
        result = batch.result
        answers = dict.fromkeys(job, SKIPPED)
        made = []
        requests = []
        for call in job:
            if result.num_lost[call.function, call.level] < MAX_LOST_WORKERS:
                made.append(call)
                requests.append(Request(_key(call.function), "score", (batch.pickled(call.rows),)))
        is_lost = False
        if made:
            found = worker.ask(requests, self.timeout_s)
            answers.update(zip(made, found, strict=True))
            is_lost = found[0].is_worker_lost
        if is_lost and len(job) > 1:
            # Any of them may be the cause, so that each counts a lost worker.
            result.num_lost.update({(call.function, call.level) for call in made})
            return [[call] for call in job]

        at_once = []
        one_by_one = []
        for call, answer in answers.items():
            if result.record(call, answer):
                continue
            smaller = result.calls(call.function, call.rows, call.level + 1, call.places)
            if self._infos[call.function].is_async and not is_lost:
                at_once += smaller
            else:
                one_by_one += [[part] for part in smaller]
        return [*one_by_one, at_once] if at_once else one_by_one

    def _log_retries(self, result: RewardResult) -> None:
        """Log that functions failed with several rows at once: once per run, function and type of error.

        A reward that compares the completions of a prompt gives other values row by row.
        """
        for number, retried in result.retried.items():
            name = self.names[number]
            call, answer = retried[0]
            # If no single row failed, only the number of rows was too slow. The calls of an async
            # function share one event loop, so that a late one shows nothing about the others.
            is_slow = answer.kind == "timeout" and not result.failures[number]
            if is_slow and not self._infos[number].is_async:
                late_groups = [c for c, a in retried if a.kind == "timeout" and c.level == GROUP]
                # One late group of several may have had a slow moment.
                are_all_late = len(late_groups) == len(result.groups)
                self._levels[number] = ROW if are_all_late else GROUP
                way = WAYS[self._levels[number]]
                logger.warning("reward %r is slower than reward.timeout_s: now called %s", name, way)
                continue

            error = answer.error or answer.message
            if not self._is_new(name, error.partition(":")[0], "with several rows"):
                continue
            way = WAYS[call.level + 1]
            num_by_row = sum(tried.level == GROUP for tried, _ in retried)
            if call.level == BATCH and num_by_row:
                way += f" (row by row for {num_by_row} of {len(result.groups)} groups)"
            logger.warning(
                "reward %r %s on %d completions at once, and was called %s: %s",
                name,
                "raised" if answer.error else "failed",
                len(call.rows),
                way,
                printable(error),
            )

    def _log_failures(self, result: RewardResult, prompts: Sequence[Any]) -> None:
        """Print a traceback once per run for each function and type of error."""
        for name, trace in result.first_traceback.items():
            last_line = trace.rstrip().rpartition("\n")[2]
            if not self._is_new(name, last_line.partition(":")[0]):
                continue
            logger.warning(
                "reward %r failed on %d of %d completions (logged once per run); first for prompt %.200r:\n%s",
                name,
                result.failures[self.names.index(name)],
                len(result.values),
                prompts[result.first_failed[name]],
                printable(trace),
            )

    def _is_new(self, *kind: str) -> bool:
        """True the first time that a kind of failure is reported in this run."""
        is_new = kind not in self._logged
        self._logged.add(kind)
        return is_new


def _key(number: int) -> tuple[str, int]:
    """The key of a function in the processes of its pool."""
    return "reward", number

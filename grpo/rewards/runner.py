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
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from grpo.rewards.calls import OUTSIDE_TRAINING, LoadedReward, Logged, RewardContractError, TrainerState
from grpo.rewards.functions import CLASSIFIER_PREFIX, ENVIRONMENTS, FunctionInfo, check_columns, unique_names
from grpo.system import printable
from grpo.workers import Answer, Here, Pool, Request, Worker
from grpo.workers.sandbox import Limits

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
    is_alone: bool
    """False: the calls of all async functions in the same places are made at once."""


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

        self.group_of: list[int] = []
        """``[B]`` the number of each row's group."""
        for number, (_, group) in enumerate(itertools.groupby(prompts)):
            self.group_of += [number for _ in group]
        self.num_lost = Counter()
        """``(function, level)`` -> calls that hung or killed their worker."""
        self.retried = defaultdict(list)
        """Function -> ``(call, answer)`` of each call with several rows that failed or was skipped, in order."""
        self._logged_by: dict[str, int] = {}
        # Several threads make calls and record their answers at the same time.
        self._lock = threading.Lock()

    @property
    def num_groups(self) -> int:
        return self.group_of[-1] + 1

    def calls(self, function: int, rows: Sequence[int], level: int, **how: Any) -> list[Call]:
        """The calls of a function at a level that cover some rows, which are in order."""
        parts = [rows]
        if level != BATCH:
            key = self.group_of.__getitem__ if level == GROUP else None
            parts = [tuple(part) for _, part in itertools.groupby(rows, key)]
        calls = []
        for part in parts:
            part_level = BATCH
            if self.group_of[part[0]] == self.group_of[part[-1]]:
                part_level = ROW if len(part) == 1 else GROUP
            calls.append(Call(function, tuple(part), part_level, **how))
        return calls

    def record(self, call: Call, answer: Answer) -> bool:
        """Store the answer to a call. Returns False if the function must be called again with fewer rows at once."""
        function = call.function
        name = self.names[function]
        with self._lock:
            if isinstance(answer.value, RewardContractError):
                raise RewardContractError(f"reward {name!r} {answer.value}")
            if answer.kind == "ok":
                self._store(call, *answer.value)
                return True

            if answer.kind in ("timeout", "died"):
                self.num_lost[function, call.level] += 1
            if call.level != ROW:
                self.retried[function].append((call, answer))
                return False

            self.failures[function] += 1
            (row,) = call.rows
            if row <= self.first_failed.get(name, row):
                self.first_failed[name] = row
                self.first_traceback[name] = answer.trace or answer.message
            return True

    def _store(self, call: Call, values: list[float | None], logged: Logged) -> None:
        for metric, (total, count) in logged.metrics.items():
            known_total, known_count = self.metrics.get(metric, (0.0, 0.0))
            self.metrics[metric] = (known_total + total, known_count + count)
        for column in logged.extra:
            if self._logged_by.setdefault(column, call.function) != call.function:
                reason = f"called log_extra({column!r}, ...), as another reward did: choose another name"
                raise RewardContractError(f"reward {self.names[call.function]!r} {reason}")
            self.extra.setdefault(column, [None] * len(self.values))
        for position, row in enumerate(call.rows):
            self.values[row][call.function] = values[position]
            for column, entries in logged.extra.items():
                self.extra[column][row] = entries[position]


@dataclass(frozen=True)
class Batch:
    """The inputs of one call of :meth:`RewardRunner.score`, and its result so far."""

    inputs: Mapping[str, Sequence[Any]]
    trainer_state: TrainerState
    result: RewardResult

    def request(self, call: Call) -> Request:
        part = {name: [entries[row] for row in call.rows] for name, entries in self.inputs.items()}
        # Columns may hold objects of the user's script, whose classes a worker cannot import.
        return Request(_key(call.function), "score", (cloudpickle.dumps((part, self.trainer_state)),))


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

    def _load(self, number: int) -> FunctionInfo:
        spec = self.specs[number]
        what = f"reward {spec.name!r}"
        key = _key(number)
        is_classifier = spec.name.startswith(CLASSIFIER_PREFIX)
        pool = self._pool
        source = (LoadedReward, spec.name, spec.args)
        info = pool.load(what, key, *source, user_object=spec.function, here=is_classifier)
        if is_classifier:
            pool.here.ask([Request(key, "to", (self._device,))], self.timeout_s)
        if self._runs_beside_environments(info):
            pool = self._environments.pool
            pool.load(what, key, *source, user_object=spec.function)
            self._environments.keep_groups_together()
            if key in pool.keys_here and self._environments.live_in_workers:
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

    def _runs_beside_environments(self, info: FunctionInfo) -> bool:
        return info.takes_environments and self._environments is not None and self._environments.environments

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
            batch = Batch(inputs, trainer_state, result)
            self._pool.begin_step()
            calls = self._first_calls(batch, rows)
            try:
                while calls:
                    calls = self._make(calls, batch)
            except BaseException:  # after a Ctrl-C, threads would wait for workers whose result nobody reads
                self.close()
                raise
            self._log_retries(result)
            self._log_failures(result, prompts)
        return result

    def _first_calls(self, batch: Batch, rows: Sequence[int]) -> list[Call]:
        """Every function with the whole batch."""
        calls = []
        for number, info in enumerate(self._infos):
            rows_of = defaultdict(list)
            for row in rows:
                rows_of[self._places(number, row, batch)].append(row)
            for places, of_places in rows_of.items():
                how = {"places": places, "is_alone": not info.is_async}
                calls += batch.result.calls(number, of_places, self._levels[number], **how)
        return calls

    def _places(self, number: int, row: int, batch: Batch) -> tuple[Worker | Here, ...]:
        """The workers that may call a function with a row."""
        if self._runs_beside_environments(self._infos[number]):
            environment = batch.inputs[ENVIRONMENTS][row]
            return (self._environments.worker_of(environment),)
        if _key(number) in self._pool.keys_here:
            return (self._pool.here,)
        return self._pool.workers

    def _make(self, calls: Sequence[Call], batch: Batch) -> list[Call]:
        """Make calls, those of different workers at the same time. Returns calls for the rows of those that failed."""
        at_once = defaultdict(list)
        jobs = defaultdict(list)
        for call in calls:
            if call.is_alone:
                jobs[call.places].append([call])
            else:
                at_once[call.places].append(call)
        for places, together in at_once.items():
            jobs[places].append(together)

        # Those of this process keep this thread busy, while the workers make the others.
        in_order = sorted(jobs, key=lambda places: isinstance(places[0], Here))
        futures = []
        for places in in_order:
            remaining = iter(jobs[places])  # each of the workers takes the next
            for worker in places:
                futures.append(worker.submit(self._work, worker, remaining, batch))
        return [call for future in futures for call in future.result()]

    def _work(self, worker: Worker | Here, jobs: Iterable[list[Call]], batch: Batch) -> list[Call]:
        following = []
        for calls in jobs:
            following += self._make_at_once(worker, calls, batch)
        return following

    def _make_at_once(self, worker: Worker | Here, calls: list[Call], batch: Batch) -> list[Call]:
        """Make calls at once, and record the answers. Returns calls for the rows of those that failed."""
        result = batch.result
        answers = dict.fromkeys(calls, SKIPPED)
        made = [call for call in calls if result.num_lost[call.function, call.level] < MAX_LOST_WORKERS]
        is_lost = False
        if made:
            found = worker.ask([batch.request(call) for call in made], self.timeout_s)
            answers.update(zip(made, found, strict=True))
            is_lost = found[0].is_worker_lost
        if is_lost and len(calls) > 1:
            # Any of them may have hung or killed the worker: each counts as lost, and is made alone.
            result.num_lost.update({(call.function, call.level) for call in made})
            return [replace(call, is_alone=True) for call in calls]

        following = []
        for call, answer in answers.items():
            if not result.record(call, answer):
                is_alone = is_lost or not self._infos[call.function].is_async
                how = {"places": call.places, "is_alone": is_alone}
                following += result.calls(call.function, call.rows, call.level + 1, **how)
        return following

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
                late = [c for c, a in retried if a.kind == "timeout" and c.level == GROUP]
                # One late group of several may have had a slow moment.
                level = ROW if len(late) == result.num_groups else GROUP
                self._levels[number] = level
                logger.warning("reward %r is slower than reward.timeout_s: now called %s", name, WAYS[level])
                continue

            error = answer.error or answer.message
            if not self._is_new(name, error.partition(":")[0], "with several rows"):
                continue
            way = WAYS[call.level + 1]
            num_by_row = sum(tried.level == GROUP for tried, _ in retried)
            if call.level == BATCH and num_by_row:
                way += f" (row by row for {num_by_row} of {result.num_groups} groups)"
            verb = "raised" if answer.error else "failed"
            text = "reward %r %s on %d completions at once, and was called %s: %s"
            logger.warning(text, name, verb, len(call.rows), way, printable(error))

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

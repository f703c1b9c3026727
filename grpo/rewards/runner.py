"""Score completions with several reward functions. In a worker process none can hang or kill the
training process.

``B`` rows (completions), ``F`` functions. A group is a run of neighbouring rows with equal prompts.

A function that hangs is ended in five steps:

1. The first call has the whole batch, unless the function asks for rows or was too slow before. It
   runs in a worker process, which a timer kills a second after ``timeout_s``
   (:meth:`grpo.workers.process.WorkerProcess.ask`). An async function that waits is cancelled at
   ``timeout_s``, and its worker lives on (:meth:`grpo.workers.host.Host.ask`).
2. The answer to the call is then of the kind ``"timeout"``. It is ``"died"`` for a function that
   has killed its worker, and ``"error"`` for one that raised.
3. A call that failed is made again for each of its groups, and where a group fails too, for each of
   its rows, each with ``timeout_s`` and in a new process if need be
   (:meth:`RewardRunner._make_all`, :meth:`Batch.split`).
4. After ``MAX_LOST_WORKERS`` groups that hung or killed a worker, the other groups go straight to
   rows; after so many rows, the others are not called (:meth:`RewardRunner._make`).
5. A row that fails alone has the value ``None`` and is counted, and the first failure of each kind
   is logged (:meth:`RewardRunner._record_failures`).

A function that takes ``environments`` is called in each process where environments of the batch
live, with the rows of that process.

This module does not communicate between ranks: the training loop makes all ranks agree on a
failure.
"""

import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from grpo.rewards.calls import (
    OUTSIDE_TRAINING,
    LoadedReward,
    RewardContractError,
    TrainerState,
)
from grpo.rewards.functions import (
    ENVIRONMENTS,
    FunctionInfo,
    unique_names,
)
from grpo.system import printable
from grpo.workers import Answer, InProcessWorker, Pool, Request, Worker

logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 8
"""Most calls of one function and step, with a group or with a row each, that may time out or kill
their worker. After so many groups the others are called row by row; after so many rows the others
are not called."""
BATCH, GROUP, ROW = range(3)
"""The levels of a call: with rows of several groups, with several rows of one group, with one row.
"""
WAYS = ("group by group", "row by row")
"""The calls that follow one of each level that has failed."""
SKIPPED = Answer(
    "skipped",
    message=f"not called, as {MAX_LOST_WORKERS} calls before it hung or killed their worker",
)


@dataclass(frozen=True)
class RewardSpec:
    """One entry of ``reward.functions``. Any object with its name, weight and args is accepted in
    its place.
    """

    name: str
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    """The function itself; Default: the function that ``name`` names."""


class RewardResult:
    """The rewards of one batch and the failures of its functions, in the order of ``names``."""

    def __init__(self, names: list[str], num_rows: int):
        self.names = names
        self.values = [[None] * len(names) for _ in range(num_rows)]
        """``[B][F]``; ``None`` where the function gave no score."""
        self.failures = [0] * len(names)
        """``[F]`` rows in which the function raised, hung, killed its worker, or was skipped after
        too many of them."""
        self.environment_failures: list[str] = []
        """Reason of the failure of each environment that got an action or has failed; empty if it
        works. Functions do not get the rows of those that have failed."""
        self.first_traceback = {}
        """Function name -> its failure in the first row: a traceback, or a sentence for a timeout
        or a death."""
        self.metrics = {}
        """Name -> ``(sum, count)`` of what the functions gave to ``log_metric``. As in TRL they may
        share a name."""
        self.extra = {}
        """Column -> ``[B]`` of what they gave to ``log_extra``; ``None`` for rows of calls that
        gave nothing."""


@dataclass(frozen=True)
class Call:
    """A call of one function."""

    function: int
    rows: tuple[int, ...]
    level: int
    """BATCH, GROUP or ROW."""
    workers: tuple[Worker, ...]
    """Any one of these makes it."""


class Batch:
    """The inputs of one call of :meth:`RewardRunner.score`, and the answers so far.

    The threads of several workers add to its answers, and to what was lost, at the same time.
    """

    def __init__(self, inputs: Mapping[str, Sequence[Any]], trainer_state: TrainerState):
        self.inputs = inputs
        self.trainer_state = trainer_state
        self.answers = {}
        """:class:`Call` -> its answer."""
        self.lost = defaultdict(list)
        """Function -> the level of each of its calls that hung or killed its worker."""
        self.group_of = []
        """``[B]`` the number of each row's group."""
        for number, (_, group) in enumerate(itertools.groupby(inputs["prompts"])):
            self.group_of += [number for _ in group]

    def split(self, call: Call, level: int) -> list[Call]:
        """Cut the rows of a call: BATCH is one call, GROUP one for each group, ROW one for each."""
        parts = [call.rows]
        if level == GROUP:
            groups = itertools.groupby(call.rows, self.group_of.__getitem__)
            parts = [tuple(rows) for _, rows in groups]
        elif level == ROW:
            parts = [(row,) for row in call.rows]
        return [Call(call.function, rows, self._level_of(rows), call.workers) for rows in parts]

    def _level_of(self, rows: Sequence[int]) -> int:
        """A batch of one group counts as a group, and a group of one row as a row."""
        if len(rows) == 1:
            return ROW
        is_one_group = self.group_of[rows[0]] == self.group_of[rows[-1]]
        return GROUP if is_one_group else BATCH

    def request(self, call: Call) -> Request:
        part = {}
        for name, entries in self.inputs.items():
            part[name] = [entries[row] for row in call.rows]
        # Pickled apart, so that each call gets a copy of its own, and a column that a worker cannot
        # read is an error of this call.
        return Request(call.function, "score", (cloudpickle.dumps((part, self.trainer_state)),))


class RewardRunner(contextlib.AbstractContextManager):
    """Runs the configured rewards. Each rank has one runner, which ends with :meth:`close` or by
    leaving its context.

    Args:
        functions: ``RewardSpec``s, or objects with ``name``, ``weight`` and ``args``. :meth:`check`
            loads them. A ``function`` that cannot be sent to a worker runs in this process;
            :attr:`notes` says so.
        timeout_s: time limit of one call, in seconds.
        num_workers: worker processes. More than one help if several functions are slow, or one that
            is called by row. Default: 1.
        environments: the :class:`grpo.turns.tools.Tools` of the run, where functions that take
            ``environments`` run.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        *,
        timeout_s: float = 10.0,
        num_workers: int | None = None,
        environments: Any = None,
    ):
        # Imported here: a worker imports this package, and needs no pydantic.
        from grpo.config.secrets import with_environment

        self.specs = []
        for f in functions:
            args = with_environment(f.args, f"reward {f.name!r}")
            function = getattr(f, "function", None)
            self.specs.append(RewardSpec(f.name.strip(), float(f.weight), args, function))
        self.names = unique_names([spec.name for spec in self.specs])
        self.weights = [spec.weight for spec in self.specs]
        self.timeout_s = timeout_s
        self._environments = environments
        self._beside_environments = set()
        """The functions that run where the environments live."""
        self._pool = Pool(num_workers or 1)
        self._infos = []
        """:class:`FunctionInfo` of each function, once :meth:`check` has loaded them."""
        self._logged = set()
        """The kinds of failures that the run has logged."""

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
        """Load every function, so that a mistake (``ValueError``) shows early, and check that its
        columns are there.
        """
        if not self._infos:
            self._infos = [self._load(number) for number in range(len(self.specs))]
        if columns is None:
            return
        for name, info in zip(self.names, self._infos, strict=True):
            missing = sorted(info.needed_columns - set(columns))
            if missing:
                raise ValueError(
                    f"reward {name!r} needs the column(s) {', '.join(missing)}; "
                    f"{source} have {', '.join(sorted(columns))}"
                )

    @property
    def notes(self) -> list[str]:
        """Messages of :meth:`check` for the user, one line each."""
        return self._pool.notes

    @property
    def source_files(self) -> dict[str, str]:
        """Name -> path of the files of the user's functions, once :meth:`check` has loaded them."""
        files = {}
        for info in self._infos:
            files |= info.source_files
        return files

    def _load(self, number: int) -> FunctionInfo:
        """Load a function. Its number is its key in the processes of its pool."""
        spec = self.specs[number]
        what = f"reward {spec.name!r}"
        source = (LoadedReward, spec.name, spec.args)
        info = self._pool.load(
            what,
            number,
            *source,
            user_object=spec.function,
            or_in_process=spec.function is not None,
        )
        # Code that hangs shall score 0 by the reward's own limit, not None by the runner's.
        if info.total_seconds >= self.timeout_s:
            limit = f"total_seconds = {info.total_seconds:g}"
            raise ValueError(f"{what}: {limit} must be less than reward.timeout_s")

        tools = self._environments
        if ENVIRONMENTS in info.named and tools is not None and tools.environment:
            # An environment cannot leave its process, so the function is loaded there too.
            self._beside_environments.add(number)
            tools.pool.load(what, number, *source, user_object=spec.function)
            # A function that compares the environments of a group needs all of them in one process.
            tools.keep_groups_together()
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
        """Score ``B`` completions; every argument has ``B`` entries (``columns``: each of its
        values).

        ``is_scored``: False for completions that no function gets. Default: all True.
        """
        inputs = dict(columns, prompts=prompts, completions=completions)
        if completion_ids is not None:
            inputs["completion_ids"] = completion_ids
        num_rows = len(completions)
        for name, entries in inputs.items():
            if len(entries) != num_rows:
                found = f"{len(entries)} for {name}"
                raise ValueError(f"expected one value per completion ({num_rows}), got {found}")
        self.check(columns)

        batch = Batch(inputs, trainer_state)
        rows = [row for row in range(num_rows) if is_scored is None or is_scored[row]]
        try:
            calls = self._first_calls(rows, batch) if rows else []
            while calls:
                calls = self._make_all(calls, batch)
        except BaseException:
            # After a Ctrl-C, threads would wait for workers whose result nobody reads.
            self.close()
            raise
        result = RewardResult(self.names, num_rows)
        self._record_values(batch, result)
        for number in range(len(self.names)):
            self._record_failures(number, batch, result)
        return result

    def _first_calls(self, rows: Sequence[int], batch: Batch) -> list[Call]:
        """Every function with the whole batch, or with the rows of each of several workers."""
        calls = []
        for number, info in enumerate(self._infos):
            workers = self._pool.workers
            if number in self._pool.in_process_keys:
                workers = (self._pool.in_process_worker,)
            rows_of = {workers: rows}
            if number in self._beside_environments:
                rows_of = defaultdict(list)
                for row in rows:
                    worker = self._environments.worker_of(batch.inputs[ENVIRONMENTS][row])
                    rows_of[(worker,)].append(row)
            for workers, part in rows_of.items():
                call = Call(number, tuple(part), BATCH, workers)
                calls += batch.split(call, ROW if info.row_by_row else BATCH)
        return calls

    def _make_all(self, calls: Sequence[Call], batch: Batch) -> list[Call]:
        """Make calls, in all workers at the same time. Returns calls for the rows of those that
        failed.
        """
        # A job is a list of calls that are made at once: those of async functions, or a single one.
        jobs = defaultdict(list)
        async_calls = defaultdict(list)
        for call in calls:
            if self._infos[call.function].is_async:
                async_calls[call.workers].append(call)
            else:
                jobs[call.workers].append([call])
        for workers, at_once in async_calls.items():
            jobs[workers].append(at_once)

        futures = []
        # Jobs of this process keep this thread busy, while the workers do the others.
        for workers in sorted(jobs, key=lambda workers: isinstance(workers[0], InProcessWorker)):
            # Each of the workers takes the next job, so that one that hangs holds up a single one.
            # Threads may share the iterator of a list: taking an item is one operation.
            queue = iter(jobs[workers])
            for worker in workers:
                futures.append(worker.submit(self._make, queue, worker, batch))
        # An exception of a thread is raised here.
        for future in futures:
            future.result()

        following = []
        for call in calls:
            # The threads leave out the calls of a function that has lost too many workers.
            answer = batch.answers.setdefault(call, SKIPPED)
            if answer.kind != "ok" and call.level != ROW:
                following += batch.split(call, call.level + 1)
        return following

    def _make(
        self,
        jobs: Iterable[list[Call]],
        worker: Worker,
        batch: Batch,
    ) -> None:
        """Make the calls of jobs, one job after the other."""
        for job in jobs:
            made = []
            for call in job:
                if batch.lost[call.function].count(call.level) < MAX_LOST_WORKERS:
                    made.append(call)
            if not made:
                continue

            answers = worker.ask([batch.request(call) for call in made], self.timeout_s)
            if answers[0].is_worker_lost and len(made) > 1:
                # Any of them may have hung or killed the worker, so that each function counts as if
                # it had done so once, and each call is made alone.
                for function, level in {(call.function, call.level) for call in made}:
                    batch.lost[function].append(level)
                self._make([[call] for call in made], worker, batch)
                continue
            for call, answer in zip(made, answers, strict=True):
                # A mistake of the function, not of a row: no smaller call would help.
                if isinstance(answer.value, RewardContractError):
                    name = self.names[call.function]
                    raise RewardContractError(f"reward {name!r} {answer.value}")
                if answer.kind in ("timeout", "died"):
                    batch.lost[call.function].append(call.level)
                batch.answers[call] = answer

    def _record_values(self, batch: Batch, result: RewardResult) -> None:
        """Store the values that the functions returned, and what they logged."""
        logged_by = {}
        for call, answer in batch.answers.items():
            if answer.kind != "ok":
                continue
            values, logged = answer.value
            # A value counts once per row, so that calls row by row give the mean of one call.
            for name, number in logged.metrics:
                total, count = result.metrics.get(name, (0.0, 0.0))
                num_rows = logged.num_rows
                result.metrics[name] = (total + number * num_rows, count + num_rows)
            for column, entries in logged.extra.items():
                if logged_by.setdefault(column, call.function) != call.function:
                    raise RewardContractError(
                        f"reward {self.names[call.function]!r} called log_extra({column!r}, ...), "
                        "as another reward did: choose another name"
                    )
                # Rows of calls that failed keep None.
                stored = result.extra.setdefault(column, [None] * len(result.values))
                for position, row in enumerate(call.rows):
                    stored[row] = entries[position]
            for position, row in enumerate(call.rows):
                result.values[row][call.function] = values[position]

    def _record_failures(self, number: int, batch: Batch, result: RewardResult) -> None:
        """Count the rows in which a function failed, and log its failures.

        They are logged once per run and type of error. A failure with several rows is logged even
        if every smaller call succeeded, because a reward that compares the completions of a prompt
        gives other values row by row.
        """
        name = self.names[number]
        failed = []
        for call, answer in batch.answers.items():
            if call.function != number or answer.kind == "ok":
                continue
            if call.level == ROW:
                failed.append((call, answer))
            else:
                way = f"and was called {WAYS[call.level]}"
                done = f"failed on {len(call.rows)} completions at once, {way}: "
                self._warn_once(call, answer, done + (answer.error or answer.message))
        if failed:
            # Answers come in the order of the threads, and the first row is the same in each run.
            call, answer = min(failed, key=lambda each: each[0].rows)
            (row,) = call.rows
            trace = answer.trace or answer.message
            result.failures[number] = len(failed)
            result.first_traceback[name] = trace
            done = (
                f"failed on {len(failed)} of {len(result.values)} completions (logged once per "
                f"run); first for prompt {batch.inputs['prompts'][row]!r:.200}:\n"
            )
            self._warn_once(call, answer, done + trace)

    def _warn_once(self, call: Call, answer: Answer, text: str) -> None:
        """Log a failure, unless the run has logged one of this function and type of error."""
        error_type = answer.error.partition(":")[0] or answer.message
        kind = (call.function, call.level == ROW, error_type)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(f"reward {self.names[call.function]!r} {printable(text)}")

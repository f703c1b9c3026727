"""Score completions with several reward functions, which run in worker processes.

Shapes: ``B`` rows, which are completions, and ``F`` functions. Neighbouring rows with equal prompts
are a group. A function that hangs or kills its process costs the scores of a few rows, and training
goes on:

1. The first call of a function gets all rows, unless the function asks for single rows. A timer
   kills the worker process a second after ``timeout_s``
   (:meth:`grpo.workers.process.WorkerProcess.ask`). An async function that waits is cancelled at
   ``timeout_s``, and its worker process lives on (:meth:`grpo.workers.host.Host.ask`).
2. A call that took too long has an answer with the status ``"timeout"``. The status is ``"died"``
   if the function ended its process, and ``"error"`` if it raised.
3. After a failed call, the function is called again for each group. After a failed group, it is
   called for each row. Each of these calls has the limit ``timeout_s``, and a new process if the
   old process was killed (:meth:`RewardRunner._run`, :meth:`Scoring.split`).
4. After ``MAX_LOST_WORKERS`` groups that hung or killed a process, the function is called row by
   row for the remaining groups. After ``MAX_LOST_WORKERS`` rows that hung or killed a process, it
   is not called for the remaining rows (:meth:`RewardRunner._run_jobs`).
5. If a call with a single row fails, the row has the value ``None``, and the failure is counted.
   The first failure of each kind is logged (:meth:`RewardRunner._record_failures`).

Environments live in worker processes. A function that takes ``environments`` is called in each of
these processes, with the rows of the environments that live there.

This module does not communicate between ranks: the training loop makes all ranks agree on a
failure.
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from grpo.rewards.calls import (
    OUTSIDE_TRAINING,
    LoadedReward,
    RewardContractError,
    TrainerState,
)
from grpo.rewards.functions import (
    ENVIRONMENTS_ARGUMENT,
    FunctionInfo,
    unique_names,
)
from grpo.system import printable
from grpo.workers import Answer, InProcessWorker, Pool, Request, Worker

logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 8
"""Limit on the calls of a function, in one batch, that hang or kill their worker process.

After so many calls with a group, the other groups are called row by row. After so many calls with a
row, the other rows are not called.
"""
BATCH, GROUP, ROW = range(3)
"""Levels of a call: rows of several groups, several rows of one group, or one row."""
RETRY_TEXTS = ("group by group", "row by row")
"""Words for messages that say how the rows of a failed call are called again.

The index is the level of the failed call, ``BATCH`` or ``GROUP``.
"""
SKIPPED_ANSWER = Answer(
    "skipped",
    message=f"not called, as {MAX_LOST_WORKERS} calls before it hung or killed their worker",
)


@dataclass(frozen=True)
class RewardSpec:
    """One entry of ``reward.functions`` in the configuration.

    Any object with the attributes ``name``, ``weight`` and ``args`` can be used instead.
    """

    name: str
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    function: Callable | None = None
    """The function as an object. Default: the function that ``name`` names."""


class RewardResult:
    """Rewards of one batch, and failures of the functions. ``names`` has the functions' names."""

    def __init__(self, names: list[str], num_rows: int):
        self.names = names
        self.values = [[None] * len(names) for _ in range(num_rows)]
        """``[B][F]`` rewards, ``None`` where a function gave no score."""
        self.failures = [0] * len(names)
        """``[F]`` number of failed rows of each function. In a failed row, the function raised,
        hung, killed its process, or was not called after too many failures."""
        self.environment_failures: list[str] = []
        """One text for each environment that got an action or has failed.

        The text is the reason of the failure, or empty if the environment works. Completions of
        failed environments are not scored.
        """
        self.first_errors = {}
        """Function name -> the error of the first row that failed: the last line of the traceback,
        or a sentence if the call timed out or its process died."""
        self.metrics = {}
        """Name of a metric -> ``(sum, count)`` of the values passed to ``log_metric``. As in TRL,
        several functions may log the same metric."""
        self.extra = {}
        """Name of a column -> ``[B]`` values passed to ``log_extra``. A row has ``None`` if its
        call failed or logged nothing."""


@dataclass(frozen=True)
class RewardCall:
    """A call of one function with some rows of the batch."""

    function: int
    """Index of the function in the configuration."""
    rows: tuple[int, ...]
    level: int
    """``BATCH``, ``GROUP`` or ``ROW``."""
    workers: tuple[Worker, ...]
    """Workers that may make the call. One of them does."""


class Scoring:
    """Inputs of one :meth:`RewardRunner.score`, and the answers to its calls so far.

    Threads of several workers write to this object at the same time. There is no lock, since a
    thread only sets a key or appends to a list, and Python does each of these in one operation.
    """

    def __init__(self, inputs: Mapping[str, Sequence], trainer_state: TrainerState):
        self.inputs = inputs
        self.trainer_state = trainer_state
        self.answers = {}
        """:class:`RewardCall` -> the answer to the call."""
        self.lost_levels = defaultdict(list)
        """Index of a function -> levels of the calls that hung or killed their worker process."""
        groups = itertools.groupby(inputs["prompts"])
        self.group_of_row = [number for number, (_, group) in enumerate(groups) for _ in group]
        """``[B]`` index of the group of each row."""

    def split(self, call: RewardCall, level: int) -> list[RewardCall]:
        """Split a call into one call per group (GROUP), one per row (ROW), or one call (BATCH)."""
        parts = [call.rows]
        if level == GROUP:
            groups = itertools.groupby(call.rows, self.group_of_row.__getitem__)
            parts = [tuple(rows) for _, rows in groups]
        elif level == ROW:
            parts = [(row,) for row in call.rows]
        return [replace(call, rows=rows, level=self._level_of(rows)) for rows in parts]

    def _level_of(self, rows: Sequence[int]) -> int:
        # A batch may consist of one group, and a group of one row. The call then gets the level
        # with fewer rows, since a retry at that level would be the same call again.
        if len(rows) == 1:
            return ROW
        is_one_group = self.group_of_row[rows[0]] == self.group_of_row[rows[-1]]
        return GROUP if is_one_group else BATCH

    def request(self, call: RewardCall) -> Request:
        """Return the request of a call, with the inputs of its rows."""
        inputs = {
            name: [entries[row] for row in call.rows] for name, entries in self.inputs.items()
        }
        # The inputs are pickled before the message is. So each call gets a copy, and a column that
        # a worker cannot unpickle is an error of this call alone.
        pickled = cloudpickle.dumps((inputs, self.trainer_state))
        return Request(call.function, "score", (pickled,))


class RewardRunner:
    """The configured reward functions of one rank, loaded in its worker processes, which
    :meth:`close` ends.

    Args:
        functions: :class:`RewardSpec` objects, or objects with ``name``, ``weight`` and ``args``.
            :meth:`check` loads the functions. A function object that cannot be sent to a worker
            process runs in this process, and :attr:`notes` says so.
        timeout_s: time limit of one call, in seconds.
        num_workers: number of worker processes. Several processes help if several functions are
            slow, or if a slow function is called row by row. Default: 1.
        environments: the :class:`grpo.turns.tools.Tools` of the run. Functions that take
            ``environments`` run in its worker processes. Default: no environments.
    """

    def __init__(
        self,
        functions: Sequence,
        *,
        timeout_s: float = 10.0,
        num_workers: int | None = None,
        environments: Any = None,
    ):
        # Imported here: a worker process imports this package, and shall not import pydantic.
        from grpo.config.secrets import with_environment

        self.specs = []
        for f in functions:
            # `${JUDGE_KEY}` stands for a secret in an environment variable. No file shows it.
            args = with_environment(f.args, f"reward {f.name!r}")
            function = getattr(f, "function", None)
            self.specs.append(RewardSpec(f.name.strip(), float(f.weight), args, function))
        self.names = unique_names([spec.name for spec in self.specs])
        self.weights = [spec.weight for spec in self.specs]
        self.timeout_s = timeout_s
        self._environments = environments
        self._functions_with_environments = set()
        """Indices of the functions that run in the worker processes of the environments."""
        self._pool = Pool(num_workers or 1)
        self._infos = []
        """:class:`FunctionInfo` of each function; empty until :meth:`check` has loaded them."""
        self._logged_failures = set()
        """Kinds of failures that have been logged, so that each kind is logged once."""

    def close(self) -> None:
        """Kill the worker processes. A later call of :meth:`score` starts new processes."""
        self._pool.close()

    def check(
        self,
        columns: Collection[str],
        source: str = "the rows",
    ) -> None:
        """Load every function, and check that the rows have the columns that it and the reset of
        the environment need.

        A run calls this method at its start, so that mistakes show before the first step.

        Args:
            columns: names of the columns of the rows.
            source: a name for the rows in messages.

        Raises:
            ValueError: if a function cannot be loaded, or a column is missing. The message is one
                line.
        """
        if not self._infos:
            self._infos = [self._load(number) for number in range(len(self.specs))]
        needs = {}
        tools = self._environments
        if tools and tools.environment:
            needs["reset of the environment"] = tools.environment.needed_columns
        for name, info in zip(self.names, self._infos, strict=True):
            needs[f"reward {name!r}"] = info.needed_columns
        for what, needed in needs.items():
            missing = sorted(needed - set(columns))
            if missing:
                raise ValueError(
                    f"{what} needs the column(s) {', '.join(missing)}; "
                    f"{source} have {', '.join(sorted(columns)) or 'none'} "
                    "(a reward gets lists, prompts and completions; a reset gets prompt; "
                    "data.answer_column=NAME makes a column the answer)"
                )

    @property
    def notes(self) -> list[str]:
        """Lines for the user from :meth:`check`, one line per message."""
        return self._pool.notes

    @property
    def source_files(self) -> dict[str, str]:
        """Name -> path of each file of the functions; empty until :meth:`check` has loaded them."""
        files = {}
        for info in self._infos:
            files |= info.source_files
        return files

    def _load(self, number: int) -> FunctionInfo:
        """Load a function in a worker process. The index of the function is its key there."""
        spec = self.specs[number]
        what = f"reward {spec.name!r}"
        factory = (LoadedReward, spec.name, spec.args)
        info = self._pool.load(
            what,
            number,
            *factory,
            user_object=spec.function,
            or_in_process=spec.function is not None,
        )
        # Code that hangs shall reach the limit of the reward, which scores 0, before the limit of
        # the runner, which scores None.
        if info.total_seconds >= self.timeout_s:
            raise ValueError(
                f"{what}: total_seconds = {info.total_seconds:g} must be less than reward.timeout_s"
            )

        tools = self._environments
        if ENVIRONMENTS_ARGUMENT in info.parameter_names and tools and tools.environment:
            # An environment cannot leave its process, so the function is loaded there too.
            self._functions_with_environments.add(number)
            tools.pool.load(what, number, *factory, user_object=spec.function)
            # A function that compares the environments of a group needs all of them in one process.
            tools.keep_groups_together()
        return info

    def score(
        self,
        prompts: Sequence,
        completions: Sequence,
        columns: dict[str, Sequence],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState = OUTSIDE_TRAINING,
        is_scored: Sequence[bool] | None = None,
    ) -> RewardResult:
        """Score ``B`` completions. Every sequence has ``B`` entries, and so has each column.

        Args:
            columns: name of a column -> its values.
            is_scored: False for completions that no function gets. Default: all are scored.

        Raises:
            ValueError: if a sequence or column does not have ``B`` entries.
            RewardContractError: if a function returned or logged a value of a wrong form.
        """
        inputs = dict(columns, prompts=prompts, completions=completions)
        if completion_ids is not None:
            inputs["completion_ids"] = completion_ids
        num_rows = len(completions)
        for name, entries in inputs.items():
            if len(entries) != num_rows:
                raise ValueError(
                    f"expected one value per completion ({num_rows}), got {len(entries)} for {name}"
                )
        self.check(columns)

        scoring = Scoring(inputs, trainer_state)
        rows = [row for row in range(num_rows) if is_scored is None or is_scored[row]]
        # Each round calls the functions again for the rows of failed calls, in smaller calls.
        calls = self._first_calls(rows, scoring) if rows else []
        while calls:
            calls = self._run(calls, scoring)

        result = RewardResult(self.names, num_rows)
        self._record_values(scoring, result)
        for number in range(len(self.names)):
            self._record_failures(number, scoring, result)
        return result

    def _first_calls(self, rows: Sequence[int], scoring: Scoring) -> list[RewardCall]:
        """Return the calls of the first round: every function with all rows."""
        calls = []
        for number, info in enumerate(self._infos):
            workers = self._pool.workers
            if number in self._pool.in_process_keys:
                workers = (self._pool.in_process_worker,)
            rows_of_workers = {workers: rows}
            if number in self._functions_with_environments:
                # Each worker with environments gets one call, with the rows of these environments.
                rows_of_workers = defaultdict(list)
                for row in rows:
                    environment = scoring.inputs[ENVIRONMENTS_ARGUMENT][row]
                    worker = self._environments.worker_of(environment)
                    rows_of_workers[(worker,)].append(row)
            for workers, part in rows_of_workers.items():
                call = RewardCall(number, tuple(part), BATCH, workers)
                calls += scoring.split(call, ROW if info.row_by_row else BATCH)
        return calls

    def _run(self, calls: Sequence[RewardCall], scoring: Scoring) -> list[RewardCall]:
        """Make calls in all workers at the same time.

        Returns smaller calls for the rows of the calls that failed.
        """
        # A job is a list of calls that are made at once: all calls of async functions, which can
        # wait at the same time, or a single call.
        jobs = defaultdict(list)
        async_calls = defaultdict(list)
        for call in calls:
            if self._infos[call.function].is_async:
                async_calls[call.workers].append(call)
            else:
                jobs[call.workers].append([call])
        for workers, job in async_calls.items():
            jobs[workers].append(job)

        futures = []
        # Jobs of this process come last, since they keep this thread busy: the workers do the other
        # jobs meanwhile.
        for workers in sorted(jobs, key=lambda workers: isinstance(workers[0], InProcessWorker)):
            # A worker takes the next job when it is free, so that a function that hangs holds up
            # one worker. Threads may share the iterator of a list: taking an item is one operation.
            queue = iter(jobs[workers])
            for worker in workers:
                futures.append(worker.submit(self._run_jobs, queue, worker, scoring))
        # An exception of a thread is raised here.
        for future in futures:
            future.result()

        retries = []
        for call in calls:
            # No thread makes the calls of a function that has lost too many workers.
            answer = scoring.answers.setdefault(call, SKIPPED_ANSWER)
            if answer.status != "ok" and call.level != ROW:
                retries += scoring.split(call, call.level + 1)
        return retries

    def _run_jobs(
        self,
        jobs: Iterable[list[RewardCall]],
        worker: Worker,
        scoring: Scoring,
    ) -> None:
        """Make the calls of jobs, one job after the other, in the thread of a worker."""
        for job in jobs:
            # Without a limit, a function that hangs in each row would take hours.
            calls = [
                call
                for call in job
                if scoring.lost_levels[call.function].count(call.level) < MAX_LOST_WORKERS
            ]
            if not calls:
                continue

            requests = [scoring.request(call) for call in calls]
            answers = worker.ask(requests, self.timeout_s)
            if answers[0].is_worker_lost and len(calls) > 1:
                # Any of the calls may have hung or killed the process, so each is made alone.
                self._run_jobs([[call] for call in calls], worker, scoring)
                continue
            for call, answer in zip(calls, answers, strict=True):
                # The mistake is in the function and not in a row, so no smaller call would help.
                if isinstance(answer.value, RewardContractError):
                    raise RewardContractError(
                        f"reward {self.names[call.function]!r} {answer.value}"
                    )
                if answer.status in ("timeout", "died"):
                    scoring.lost_levels[call.function].append(call.level)
                scoring.answers[call] = answer

    def _record_values(self, scoring: Scoring, result: RewardResult) -> None:
        """Store the values that the functions returned, and the values that they logged."""
        function_of_column = {}
        for call, answer in scoring.answers.items():
            if answer.status != "ok":
                continue
            values, log = answer.value
            # A value is weighted by the rows of its call: calls row by row then have the same mean
            # as one call of all rows.
            for name, number in log.metrics:
                total, count = result.metrics.get(name, (0.0, 0.0))
                num_rows = log.num_rows
                result.metrics[name] = (total + number * num_rows, count + num_rows)
            for column, entries in log.extra.items():
                # Two functions that log the same column would overwrite each other's values.
                if function_of_column.setdefault(column, call.function) != call.function:
                    raise RewardContractError(
                        f"reward {self.names[call.function]!r} called log_extra({column!r}, ...), "
                        "as another reward did: choose another name"
                    )
                # The rows of failed calls keep None.
                stored = result.extra.setdefault(column, [None] * len(result.values))
                for position, row in enumerate(call.rows):
                    stored[row] = entries[position]
            for position, row in enumerate(call.rows):
                result.values[row][call.function] = values[position]

    def _record_failures(self, number: int, scoring: Scoring, result: RewardResult) -> None:
        """Count the rows in which a function failed, and log its failures.

        A failure is logged once per run and type of error. A failed call with several rows is
        logged even if all smaller calls succeeded: a reward that compares the completions of a
        prompt gives other values when it is called row by row.
        """
        name = self.names[number]
        failed_rows = []
        for call, answer in scoring.answers.items():
            if call.function != number or answer.status == "ok":
                continue
            if call.level == ROW:
                failed_rows.append((call, answer))
            else:
                text = (
                    f"failed on {len(call.rows)} completions at once, "
                    f"and was called {RETRY_TEXTS[call.level]}: {answer.error or answer.message}"
                )
                self._warn_once(call, answer, text)
        if failed_rows:
            # The order of the answers differs between runs, so the failed row with the lowest index
            # is reported.
            call, answer = min(failed_rows, key=lambda each: each[0].rows)
            (row,) = call.rows
            trace = answer.trace or answer.message
            result.failures[number] = len(failed_rows)
            result.first_errors[name] = trace.rstrip().rpartition("\n")[2]
            text = (
                f"failed on {len(failed_rows)} of {len(result.values)} completions (logged once); "
                f"first for prompt '..{str(scoring.inputs['prompts'][row])[-200:]}':\n{trace}"
            )
            self._warn_once(call, answer, text)

    def _warn_once(self, call: RewardCall, answer: Answer, text: str) -> None:
        """Log a failure, unless the run has logged a failure of this function and type of error."""
        # Failures of one row and failures of several rows are logged separately, since the messages
        # name different consequences.
        error_type = answer.error.partition(":")[0] or answer.message
        kind = (call.function, call.level == ROW, error_type)
        if kind not in self._logged_failures:
            self._logged_failures.add(kind)
            # The text of a model may have control characters, which a terminal would obey.
            logger.warning(f"reward {self.names[call.function]!r} {printable(text)}")

"""The process that runs reward functions: it answers one request after another until its connection ends.

It imports no torch unless a reward does, and calls every function in its main thread, because ``math_verify`` and
others use SIGALRM. Rewards that run in the training process use the class :class:`Worker` directly.
"""

import asyncio
import inspect
import math
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from grpo.rewards import functions
from grpo.system import UserError, end_with_parent, first_line

GATHER_GRACE_SECONDS = 1.0
"""Coroutines are cancelled at their limit. If they have not ended this many seconds later, they block."""
MAX_TRACEBACK_LENGTH = 8000
MAX_REWARD = 3.4028234663852886e38
"""The largest number in fp32, in which the trainer stores rewards."""
METRICS = frozenset({
    "step", "epoch", "reward", "reward_std", "reward_group_std", "frac_reward_zero_std", "frac_unscorable", "loss",
    "kl", "entropy", "grad_norm", "learning_rate", "ratio", "skipped_updates", "num_tokens",
    "completion_tokens", "step_time", "tokens_per_second",
})  # fmt: skip
"""Metrics of the trainer: ``log_metric`` refuses these names."""
METRIC_GROUPS = ("clip_ratio/", "completions/", "eval/", "histograms/", "rewards/", "sampling/", "tables/", "time/")
"""``log_metric`` refuses names that start with one of these too."""
COLUMNS = frozenset({
    "step", "problem", "prompt", "answer", "completion", "rewards", "reward", "advantage", "length", "finished",
    "token_ids", "tokens", "logprobs", "updated_logprobs", "ref_logprobs", "logged",
})  # fmt: skip
"""Columns of the completions that a run keeps: ``log_extra`` refuses these names."""


class RewardContractError(UserError):
    """A reward did not return one float or ``None`` per completion, or misused ``log_metric`` or ``log_extra``."""


@dataclass(frozen=True)
class TrainerState:
    """The position of the run, under the names of ``transformers.TrainerState``. Outside training all are 0."""

    global_step: int = 0
    """Steps that are complete: 0 in the first step."""
    epoch: float = 0.0
    max_steps: int = 0


OUTSIDE_TRAINING = TrainerState()


@dataclass
class Logged:
    """The metrics and columns that one call of a reward with ``num_rows`` completions reported."""

    num_rows: int
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> ``(sum, count)`` of its values. Each value counts once per completion of the call."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Column -> one value per completion."""
    mistake: str | None = None
    """The first misuse. Kept instead of raised: a reward may catch exceptions."""

    def log_metric(self, name: str, value: Any) -> None:
        """Report a number for this batch. NaN is left out."""
        try:
            number = math.inf if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.inf
        if not _is_name(name) or name in METRICS or name.startswith(METRIC_GROUPS):
            self._refuse(f"called log_metric({name!r}, ...): choose a name that no metric of the trainer has")
        elif math.isinf(number):
            kind = "infinity" if isinstance(value, float) else f"a value of type {type(value).__name__}"
            self._refuse(f"called log_metric({name!r}, ...) with {kind}: expected a finite number")
        elif not math.isnan(number):
            total, count = self.metrics.get(name, (0.0, 0.0))
            self.metrics["".join(name)] = (total + number * self.num_rows, count + self.num_rows)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Report a column for the completions that the run keeps. What is no number or ``None`` is kept as its text."""
        values = list(values.tolist() if hasattr(values, "tolist") else values)
        if not _is_name(column) or column in COLUMNS or column.startswith("rewards/"):
            self._refuse(f"called log_extra({column!r}, ...): choose a name that no column of the completions has")
        elif len(values) != self.num_rows:
            number = f"{len(values)} values for {self.num_rows} completions"
            self._refuse(f"called log_extra({column!r}, ...) with {number}: expected one per completion")
        else:
            self.extra["".join(column)] = [_plain(value) for value in values]

    def _refuse(self, mistake: str) -> None:
        self.mistake = self.mistake or mistake


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name != "" and name.isprintable()


def _plain(value: Any) -> str | int | float | None:
    """Numbers and text as Python's own types: the trainer cannot import the classes of the reward's module."""
    value = value.item() if hasattr(value, "item") else value  # numpy, torch
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and abs(value) <= 2**53:  # a float holds it exactly
        return int(value)
    return None if value is None else "".join(str(value))


@dataclass(frozen=True)
class RewardInputs:
    """The rows of one call: ``B`` prompts, completions and values of each column."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: dict[str, Sequence[Any]]
    completion_ids: Sequence[Sequence[int]] | None = None
    trainer_state: TrainerState = OUTSIDE_TRAINING

    def pickled(self, rows: range) -> bytes:
        """Some of the rows, for ``Worker.run``."""
        part = slice(rows.start, rows.stop)
        columns = {name: values[part] for name, values in self.columns.items()}
        ids = None if self.completion_ids is None else self.completion_ids[part]
        try:
            return pickle.dumps(
                replace(
                    self,
                    prompts=self.prompts[part],
                    completions=self.completions[part],
                    columns=columns,
                    completion_ids=ids,
                )
            )
        except Exception as error:  # values of the user's data may be of any class
            raise ValueError(f"a column cannot be sent to the worker process of the rewards: {error}") from error


@dataclass
class Outcome:
    """The result of one call of a reward."""

    kind: str
    """``"ok"``; ``"error"``: it raised; ``"timeout"``; ``"died"``: its process ended; ``"contract"``: wrong values."""
    values: list[float | None] = field(default_factory=list)
    """``[B]`` if ``kind`` is ``"ok"``."""
    message: str = ""
    """The traceback of an error, the cause of a death, or what is wrong with the values."""
    logged: Logged = field(default_factory=lambda: Logged(0))


def call_reward(function: Callable[..., Any], args: dict[str, Any], inputs: RewardInputs, logged: Logged) -> Any:
    """Call a reward by keyword, as TRL does, with the inputs that its signature takes, and with ``args``."""
    given = dict(prompts=inputs.prompts, completions=inputs.completions, completion_ids=inputs.completion_ids)
    given |= dict(trainer_state=inputs.trainer_state, log_metric=logged.log_metric, log_extra=logged.log_extra)
    available = {**inputs.columns, **given}
    return function(**{name: available[name] for name in functions.passed_names(function, available, args)}, **args)


def checked(values: Any, logged: Logged) -> list[float | None]:
    """The return value of a reward as one float or ``None`` per row. NaN becomes ``None``.

    Lists, tuples, arrays and tensors of numbers of any type are accepted. A string, a value beyond :data:`MAX_REWARD`,
    another length, or a misuse of ``log_metric`` or ``log_extra`` is a ``RewardContractError``; nothing is guessed.
    """
    if logged.mistake:
        raise RewardContractError(logged.mistake)
    num_rows = logged.num_rows
    expected = f"expected a list of {num_rows} values, each a float or None, one per completion"
    if hasattr(values, "tolist"):  # numpy, torch
        values = values.tolist()
    if callable(values):
        raise RewardContractError(f"returned a function: it makes the reward; {functions.MAKE_IT_IN_THE_FILE}")
    if not isinstance(values, (list, tuple)):
        raise RewardContractError(f"returned {values!r:.100} of type {type(values).__name__}; {expected}")
    if len(values) != num_rows:
        count = f"{len(values)} values for {num_rows} completions"
        raise RewardContractError(f"returned {count}: {values!r:.100}; {expected}")
    return [_number(value, f"for completion {row}; {expected}") for row, value in enumerate(values)]


def _number(value: Any, expected: str) -> float | None:
    try:
        number = math.nan if value is None else math.inf if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if abs(number) > MAX_REWARD:
        raise RewardContractError(f"returned {value!r:.100} of type {type(value).__name__} {expected}")
    return None if math.isnan(number) else number


class Worker:
    """Loaded functions by key, and one event loop for their coroutines, because an HTTP client is bound to its loop.

    Args:
        is_process: this is a process of its own, which may be killed, and in which no Ctrl-C arrives. Otherwise
            coroutines run in another thread: the cell of a notebook runs inside an event loop already.
    """

    def __init__(self, is_process: bool):
        self.functions: dict[int, tuple[Callable[..., Any], dict[str, Any]]] = {}
        self.is_process = is_process
        self._loop: asyncio.AbstractEventLoop | None = None

    def load(
        self, key: int, spec: str, args: dict[str, Any], given: bytes | Callable[..., Any] | None
    ) -> functions.FunctionInfo:
        """Load the function that ``spec`` names, or the one that is ``given``: pickled, or as it is.

        ``ValueError`` if there is none, or if its arguments are wrong.
        """
        try:
            function = pickle.loads(given) if isinstance(given, bytes) else given
            function = functions.load_reward(spec) if function is None else function
            functions.check_arguments(spec, function, args)
            # A built-in checks its arguments before any row, so a call without rows checks them.
            if functions.is_builtin(function):
                call_reward(function, args, RewardInputs([], [], {}, []), Logged(0))
        except Exception as error:  # of any type: an object may fail to be unpickled, the sandbox to start
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(message if spec in message else f"reward {spec!r}: {message}") from None
        self.functions[key] = (function, args)
        return functions.describe(spec, function, args)

    def run(self, calls: Sequence[tuple[int, bytes]], timeout_s: float) -> list[Outcome]:
        """Call functions by their keys with pickled ``RewardInputs``, so that each call has a copy of its own.

        Coroutines run concurrently, and each is cancelled after ``timeout_s``. Nothing else is stopped here.
        """
        started = [self._start(*call, timeout_s) for call in calls]
        waiting = [outcome for outcome in started if inspect.iscoroutine(outcome)]
        finished = iter(self._complete(waiting, timeout_s) if waiting else ())
        return [next(finished) if inspect.iscoroutine(outcome) else outcome for outcome in started]

    def _start(self, key: int, inputs: bytes, timeout_s: float) -> Outcome | Coroutine[Any, Any, Outcome]:
        try:
            rows = pickle.loads(inputs)
            logged = Logged(len(rows.completions))  # counted before the call, which may empty the lists
            values = call_reward(*self.functions[key], rows, logged)
            if inspect.isawaitable(values):
                return self._finish(values, logged, timeout_s)
            return Outcome("ok", checked(values, logged), logged=logged)
        except self._caught as error:
            return _failure(error)

    async def _finish(self, values: Any, logged: Logged, timeout_s: float) -> Outcome:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                values = await values
            return Outcome("ok", checked(values, logged), logged=logged)
        except self._caught as error:
            if not limit.expired():
                return _failure(error)
            # A thread that the coroutine started by asyncio.to_thread may still hang: the next ones get new threads.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
            return Outcome("timeout")

    @property
    def _caught(self) -> Any:
        """The exceptions that cost a call only: in a worker all, in the trainer's process not a Ctrl-C."""
        return BaseException if self.is_process else (Exception, SystemExit, asyncio.CancelledError)

    def _complete(self, coroutines: Sequence[Coroutine[Any, Any, Outcome]], timeout_s: float) -> list[Outcome]:
        async def gather() -> list[Outcome]:
            outcomes = await asyncio.gather(*coroutines, return_exceptions=True)  # a task may have cancelled itself
            return [found if isinstance(found, Outcome) else _failure(found) for found in outcomes]

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            if not self.is_process:
                threading.Thread(target=self._loop.run_forever, daemon=True, name="async rewards").start()
        if self.is_process:
            return self._loop.run_until_complete(gather())
        future = asyncio.run_coroutine_threadsafe(gather(), self._loop)
        if wait([future], timeout_s + GATHER_GRACE_SECONDS).done:
            return future.result()
        future.cancel()
        self._loop = None  # a coroutine blocks it: the next call gets a new loop in a new thread
        return [Outcome("timeout") for _ in coroutines]


def _failure(error: BaseException) -> Outcome:
    """The outcome of a call that raised: with the traceback from the user's function on."""
    if isinstance(error, RewardContractError):
        return Outcome("contract", message=str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(trace)))
    return Outcome("error", message=text[-MAX_TRACEBACK_LENGTH:])


def main(descriptor: int, parent: int) -> None:
    """Answer requests from the connection on file ``descriptor``; ``parent`` is the process id of the other end.

    A request is a method of :class:`Worker` and its arguments; the answer is what it returns, or its ``ValueError``.
    """
    end_with_parent()
    if os.getppid() != parent:  # the parent ended before end_with_parent() took effect
        os._exit(1)
    os.set_inheritable(descriptor, False)  # programs that a reward starts do not get the connection
    connection, worker, own_id = Connection(descriptor), Worker(is_process=True), os.getpid()
    while True:
        method, *arguments = connection.recv()
        try:
            answer = getattr(worker, method)(*arguments)
        except ValueError as error:
            answer = error
        if os.getpid() != own_id:  # a child that a reward forked has returned from the reward; it must not answer too
            os._exit(0)
        connection.send(answer)

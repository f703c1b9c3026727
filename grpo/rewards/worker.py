"""The process that runs reward functions: it answers one request after another until its connection ends.

It imports no torch unless a reward does, and calls every function in its main thread, because ``math_verify`` and
others use SIGALRM. Rewards that run in the training process use the class :class:`Worker` directly.
"""

import asyncio
import contextlib
import importlib
import inspect
import math
import os
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from grpo.rewards import functions
from grpo.system import UserError, end_with_parent, first_line

GATHER_GRACE_SECONDS = 1.0
"""Coroutines are cancelled at their limit. If they have not ended this many seconds later, they block."""
MAX_TRACEBACK_LENGTH = 8000
CAUGHT = (Exception, SystemExit, asyncio.CancelledError)
"""The exceptions of a reward that cost one call. Any other, such as KeyboardInterrupt, ends a worker process."""
MAX_REWARD = 3.4028234663852886e38
"""The largest number in fp32, in which the trainer stores rewards."""
METRICS = frozenset({
    "step", "epoch", "reward", "reward_std", "reward_group_std", "frac_reward_zero_std", "frac_unscorable", "loss",
    "kl", "entropy", "grad_norm", "learning_rate", "ratio", "skipped_updates", "num_tokens",
    "completion_tokens", "step_time", "tokens_per_second",
})  # fmt: skip
"""Metrics of the trainer: ``log_metric`` refuses these names."""
METRIC_GROUPS = (
    "clip_ratio/", "completions/", "eval/", "histograms/", "rewards/", "sampling/", "stop_reason/", "tables/", "time/",
    "tools/", "turns/",
)  # fmt: skip
"""``log_metric`` refuses names that start with one of these too."""
COLUMNS = frozenset({
    "step", "problem", "prompt", "answer", "completion", "rewards", "reward", "advantage", "length", "finished",
    "token_ids", "tokens", "logprobs", "updated_logprobs", "ref_logprobs", "logged", "sampled", "messages",
    "stop_reason",
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

    def log_metric(self, name: str, value: Any) -> None:
        """Report a number for this batch. NaN is left out."""
        number = _number(value)
        if name in METRICS or name.startswith(METRIC_GROUPS):
            raise RewardContractError(f"called log_metric({name!r}, ...): a metric of the trainer has that name")
        if math.isinf(number):
            raise RewardContractError(f"called log_metric({name!r}, {value!r:.100}): expected a finite number")
        if not math.isnan(number):
            total, count = self.metrics.get(name, (0.0, 0.0))
            self.metrics["".join(name)] = (total + number * self.num_rows, count + self.num_rows)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Report a column for the completions that the run keeps. What is no number or ``None`` is kept as its text."""
        if column in COLUMNS or column.startswith("rewards/"):
            raise RewardContractError(f"called log_extra({column!r}, ...): a column of the completions has that name")
        values = list(values.tolist() if hasattr(values, "tolist") else values)
        if len(values) != self.num_rows:
            number = f"{len(values)} values for {self.num_rows} completions"
            raise RewardContractError(f"called log_extra({column!r}, ...) with {number}: expected one per completion")
        self.extra["".join(column)] = [_plain(value) for value in values]


def _plain(value: Any) -> str | int | float | None:
    """Numbers and text as Python's own types: the trainer cannot import the classes of the reward's module."""
    value = value.item() if hasattr(value, "item") else value  # numpy, torch
    is_exact = type(value) in (bool, float) or (type(value) is int and abs(value) <= 2**53)  # in a float
    return value if value is None or is_exact else "".join(str(value))


def _number(value: Any) -> float:
    """``value`` as a float; infinity for what is no number: text, which ``float`` would read, a list, a mapping."""
    return float(value) if hasattr(value, "__float__") else math.inf


@dataclass
class Outcome:
    """The result of one call of a reward."""

    kind: str
    """``"ok"``; ``"error"``: it raised; ``"timeout"``; ``"died"``: its process ended; ``"skipped"``: it was
    not called; ``"contract"``: wrong values."""
    values: list[float | None] = field(default_factory=list)
    """``[B]`` if ``kind`` is ``"ok"``."""
    message: str = ""
    """The traceback of an error, the cause of a timeout or death, or what is wrong with the values."""
    error: str = ""
    """Type and message of an error, in one line."""
    logged: Logged = field(default_factory=lambda: Logged(0))


def call_reward(
    function: Callable[..., Any], args: dict[str, Any], inputs: Mapping[str, Any], logged: Logged,
    trainer_state: TrainerState = OUTSIDE_TRAINING,
) -> Any:  # fmt: skip
    """Call a reward by keyword, as TRL does, with the inputs that its signature takes, and with ``args``."""
    available = {**inputs, "trainer_state": trainer_state}
    available |= {"log_metric": logged.log_metric, "log_extra": logged.log_extra}
    return function(**{name: available[name] for name in functions.passed_names(function, available, args)}, **args)


def checked(values: Any, logged: Logged) -> list[float | None]:
    """The return value of a reward (list, tuple, array or tensor) as one float or ``None`` per row. NaN is ``None``."""
    values = values.tolist() if hasattr(values, "tolist") else values  # numpy, torch
    is_list = isinstance(values, list | tuple)
    found = f"{len(values)} values for {logged.num_rows} completions" if is_list else f"a {type(values).__name__}"
    expected = f"expected a list of {logged.num_rows} values, each a float or None, one per completion"
    if not is_list or len(values) != logged.num_rows:
        raise RewardContractError(f"returned {found}: {values!r:.100}; {expected}")
    numbers = [math.nan if value is None else _number(value) for value in values]
    for row, number in enumerate(numbers):
        if abs(number) > MAX_REWARD:
            wrong = f"{values[row]!r:.100} of type {type(values[row]).__name__}"
            raise RewardContractError(f"returned {wrong} for completion {row}; {expected}")
    return [None if math.isnan(number) else number for number in numbers]


class EventLoop:
    """One event loop for all coroutines of a worker, because an HTTP client is bound to its loop."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_thread = False

    def run(self, coroutine: Awaitable[Any]) -> Any:
        """The result of a coroutine, which runs in this thread unless an event loop runs here already."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # The cell of a notebook runs inside of an event loop, and a thread can run only one.
            with contextlib.suppress(RuntimeError):  # no event loop runs here
                self._has_thread = asyncio.get_running_loop() is not None
            if self._has_thread:
                thread = threading.Thread(
                    target=self._loop.run_forever,
                    daemon=True,
                )
                thread.start()
        if not self._has_thread:
            return self._loop.run_until_complete(coroutine)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()


class Worker:
    """Loaded functions by key, in a process of its own or in the trainer's."""

    def __init__(self):
        self.functions = {}
        """Key -> the function and its ``args``."""
        self._loop = EventLoop()

    def load(
        self, key: int, spec: str, args: dict[str, Any], own: bytes | Callable[..., Any] | None
    ) -> functions.FunctionInfo | ValueError:
        """Load the user's ``own`` function (pickled, or as it is), or the one that ``spec`` names.

        Returns a ``ValueError`` if there is none, or if its arguments are wrong.
        """
        try:
            function = pickle.loads(own) if isinstance(own, bytes) else own
            function = functions.load_reward(spec) if function is None else function
            functions.check_arguments(spec, function, args)
            # A built-in checks its arguments before any row, so a call without rows checks them.
            if functions.is_builtin(function):
                call_reward(function, args, {"prompts": [], "completions": [], "completion_ids": []}, Logged(0))
        except Exception as error:  # of any type: an object may fail to be unpickled, the sandbox to start
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
            return ValueError(message if f"reward {spec!r}" in message else f"reward {spec!r}: {message}")
        self.functions[key] = (function, args)
        return functions.describe(spec, function, args)

    def run(self, calls: Sequence[tuple[int, bytes]], timeout_s: float) -> list[Outcome]:
        """Call functions by their keys, each with a copy of its own of the pickled inputs and ``TrainerState``.

        Coroutines run concurrently, and each is cancelled after ``timeout_s``. Nothing else is stopped here.
        """
        outcomes = []
        waiting = []
        for key, pickled in calls:
            outcome = self._start(key, pickled, timeout_s)
            if inspect.iscoroutine(outcome):
                waiting.append(outcome)
            outcomes.append(outcome)

        finished = iter(())
        if waiting:
            finished = iter(self._loop.run(_gather(waiting)))
        return [next(finished) if inspect.iscoroutine(o) else o for o in outcomes]

    def _start(self, key: int, pickled: bytes, timeout_s: float) -> Outcome | Coroutine[Any, Any, Outcome]:
        try:
            inputs, trainer_state = pickle.loads(pickled)
            logged = Logged(len(inputs["completions"]))  # counted before the call, which may empty the lists
            if "environments" in inputs and functions.passed_names(self.functions[key][0], ["environments"], ()):
                inputs["environments"] = [found and found.load() for found in inputs["environments"]]
            values = call_reward(*self.functions[key], inputs, logged, trainer_state)
            if inspect.isawaitable(values):
                return _finish(values, logged, timeout_s)
            return Outcome("ok", checked(values, logged), logged=logged)
        except CAUGHT as error:
            return _failure(error)


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
    outcomes = []
    for found in await asyncio.gather(*coroutines, return_exceptions=True):
        if not isinstance(found, Outcome):  # a task may have cancelled itself
            found = _failure(found)
        outcomes.append(found)
    return outcomes


async def _finish(values: Any, logged: Logged, timeout_s: float) -> Outcome:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            values = await values
        return Outcome("ok", checked(values, logged), logged=logged)
    except CAUGHT as error:
        if not limit.expired():
            return _failure(error)
        # A thread that the coroutine started by asyncio.to_thread may still hang: the next ones get new threads.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
        return Outcome("timeout", message="it did not return within reward.timeout_s")


def _failure(error: BaseException) -> Outcome:
    """The outcome of a call that raised: with the traceback from the user's function on."""
    if isinstance(error, RewardContractError):
        return Outcome("contract", message=str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(trace)))
    last_lines = traceback.format_exception_only(error)[0].splitlines()
    return Outcome(
        "error",
        message=text[-MAX_TRACEBACK_LENGTH:],
        error=last_lines[0],
    )


@dataclass(frozen=True)
class Pickled:
    """An environment, as a reward gets it in its worker."""

    name: str
    """The module or file of its class, which must be imported first."""
    data: bytes
    is_object: bool = False
    """True if the class is in ``data``."""

    def load(self) -> Any:
        if not self.is_object:
            functions.load_object(self.name, "environment", "")
        return pickle.loads(self.data)


def main(descriptor: int, parent: int, worker: str) -> None:
    """Answer requests from the connection on file ``descriptor``; ``parent`` is the process id of the other end.

    A request is a method of the class ``worker`` and its arguments; the answer is what it returns.
    """
    end_with_parent()
    if os.getppid() != parent:  # the parent ended before end_with_parent() took effect
        os._exit(1)
    os.set_inheritable(descriptor, False)  # programs that a reward starts do not get the connection
    module, _, name = worker.partition(":")
    connection = Connection(descriptor)
    own_id = os.getpid()
    answers = getattr(importlib.import_module(module), name)()
    while True:
        method, *arguments = connection.recv()
        answer = getattr(answers, method)(*arguments)
        if os.getpid() != own_id:  # a child that a reward forked has returned from the reward; it must not answer too
            os._exit(0)
        connection.send(answer)

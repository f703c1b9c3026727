"""The worker process that runs reward functions: it answers one request after another until the connection to its parent ends.

A message is a header (:data:`HEADER`: job number, length of the body) and a pickled body. An answer repeats the job number of its request.

The worker imports no torch unless a reward does, and calls every function in its main thread, because ``math_verify`` and others use
SIGALRM. Text that a function prints goes to the worker's stdout and stderr, never to the connection.

A request is a tuple; the answer is ``(kind, value)``:

| request | answer |
|---|---|
| ``("load", key, spec, args, pickled)`` | ``("ok", FunctionInfo)``, ``("invalid", message)`` or ``("not sent", reason)`` |
| ``("call", key, inputs)`` | an outcome |
| ``("gather", [(key, inputs), ...], seconds)`` | ``("ok", [outcome, ...])``: coroutines that ran concurrently |

An outcome is ``("ok", [float | None] * B)``, ``("error", traceback)``, ``("timeout", None)`` or ``("contract", message)``. Where the
function has reported metrics or columns, ``(metrics, extra)`` of :class:`grpo.rewards.logged.Logged` is a third item after ``"ok"``.
"""

import asyncio
import contextlib
import copy
import inspect
import math
import os
import pickle
import reprlib
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.rewards.logged import OUTSIDE_TRAINING, Logged, TrainerState
from grpo.rewards.registry import (
    MAKE_IT_IN_THE_FILE,
    check_arguments,
    is_async,
    is_builtin,
    load_reward,
    needed_columns,
    passed_names,
    source_files,
)
from grpo.system import end_with_parent, first_line

HEADER = struct.Struct("=QQ")
MAX_TRACEBACK_LENGTH = 8000
MAX_REWARD = 3.4028234663852886e38
"""The largest number in fp32, in which the trainer stores rewards."""


@dataclass(frozen=True)
class FunctionInfo:
    """Properties of a loaded reward function, for the parent process, which does not import the function."""

    is_async: bool
    row_by_row: bool
    """True if the function asks, by ``fn.row_by_row = True``, to be called with one row at a time."""
    needed_columns: frozenset[str]
    source_files: tuple[tuple[str, str], ...] = ()
    """See ``registry.source_files``."""


@dataclass(frozen=True)
class RewardInputs:
    """The rows of one call: ``B`` prompts, completions and values of each column."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: dict[str, Sequence[Any]]
    completion_ids: Sequence[Sequence[int]] | None = None
    trainer_state: TrainerState = OUTSIDE_TRAINING

    def __len__(self) -> int:
        return len(self.completions)

    def row(self, index: int) -> "RewardInputs":
        """Row ``index`` as a batch of one."""
        part = slice(index, index + 1)
        columns = {name: values[part] for name, values in self.columns.items()}
        ids = None if self.completion_ids is None else self.completion_ids[part]
        return RewardInputs(self.prompts[part], self.completions[part], columns, ids, self.trainer_state)


def call_reward(function: Callable[..., Any], args: dict[str, Any], inputs: RewardInputs, logged: Logged) -> Any:
    """Call a reward by keyword, as TRL does, with the inputs that its signature takes, and with ``args``."""
    given = dict(prompts=inputs.prompts, completions=inputs.completions, completion_ids=inputs.completion_ids)
    given |= dict(trainer_state=inputs.trainer_state, log_metric=logged.log_metric, log_extra=logged.log_extra)
    available = {**inputs.columns, **given}
    return function(**{name: available[name] for name in passed_names(function, available, args)}, **args)


def describe(spec: str, function: Callable[..., Any], args: dict[str, Any]) -> FunctionInfo:
    """The properties of a loaded function that the trainer needs."""
    row_by_row = bool(getattr(function, "row_by_row", False))
    return FunctionInfo(is_async(function), row_by_row, needed_columns(function, args), source_files(spec, function))


def check_values(values: Any, num_rows: int) -> tuple[str, Any]:
    """Turn the return value of a reward into an outcome: one float or ``None`` per row. NaN becomes ``None``.

    Lists, tuples, arrays and tensors of numbers of any type are accepted. A string, a value beyond :data:`MAX_REWARD` or another
    length is a ``"contract"`` outcome; nothing is guessed.
    """
    expected = f"expected a list of {num_rows} values, each a float or None, one per completion"
    if hasattr(values, "tolist"):  # numpy, torch
        values = values.tolist()
    if callable(values):
        return "contract", f"returned a function: it makes the reward; {MAKE_IT_IN_THE_FILE}"
    if not isinstance(values, (list, tuple)):
        return "contract", f"returned {_short_repr(values)} of type {type(values).__name__}; {expected}"
    if len(values) != num_rows:
        message = f"returned {len(values)} values for {num_rows} completions: {_short_repr(values)}; {expected}"
        return "contract", message
    checked: list[float | None] = []
    for row, value in enumerate(values):
        number = value
        if value is not None and not isinstance(value, (str, bytes)):
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = "not a number"
        if isinstance(number, (str, bytes)) or (number is not None and abs(number) > MAX_REWARD):
            kind = type(value).__name__
            return "contract", f"returned {_short_repr(value)} of type {kind} for completion {row}; {expected}"
        checked.append(None if number is None or math.isnan(number) else number)
    return "ok", checked


_reprs = reprlib.Repr()  # reads the first elements only, however large the value is
_reprs.maxstring = _reprs.maxother = 100
_short_repr = _reprs.repr


def _error_outcome() -> tuple[str, str]:
    """The outcome for the exception that is being handled."""
    text = traceback.format_exc()
    return "error", text if len(text) <= MAX_TRACEBACK_LENGTH else "...\n" + text[-MAX_TRACEBACK_LENGTH:]


class Worker:
    """The loaded functions by key, and one event loop for all coroutines, because an HTTP client is bound to its loop."""

    def __init__(self) -> None:
        self.functions: dict[int, tuple[Callable[..., Any], dict[str, Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    def answer(self, request: tuple[Any, ...]) -> tuple[str, Any]:
        kind, *arguments = request
        return {"load": self.load, "call": self.call, "gather": self.gather}[kind](*arguments)

    def load(self, key: int, spec: str, args: dict[str, Any], pickled: bytes | None = None) -> tuple[str, Any]:
        """Load the function that ``spec`` names, or the one that ``pickled`` holds (see ``grpo.rewards.objects``)."""
        function = None
        try:
            if pickled is not None:
                function = pickle.loads(pickled)
        except Exception as error:
            return "not sent", f"{type(error).__name__}: {first_line(error)}"
        try:
            function = load_reward(spec) if function is None else function
            check_arguments(spec, function, args)
            if is_builtin(function):
                # Built-in rewards check their arguments before any row, so a call without rows checks them.
                call_reward(function, args, RewardInputs([], [], {}, []), Logged(0))
        except ValueError as error:
            message = str(error)
            return "invalid", message if spec in message else f"reward {spec!r}: {message}"
        self.functions[key] = (function, args)
        return "ok", describe(spec, function, args)

    def call(self, key: int, inputs: RewardInputs) -> tuple[Any, ...]:
        function, args = self.functions[key]
        logged = Logged(len(inputs))  # counted before the call, which may empty the lists
        try:
            values = call_reward(function, args, inputs, logged)
            if inspect.isawaitable(values):
                values = self.loop.run_until_complete(awaited(values))
        except BaseException:
            return _error_outcome()
        return logged.added_to(check_values(values, logged.num_rows))

    def gather(self, calls: list[tuple[int, RewardInputs]], seconds: float) -> tuple[str, Any]:
        async def outcome_of(key: int, inputs: RewardInputs) -> tuple[Any, ...]:
            function, args = self.functions[key]
            logged = Logged(len(inputs))
            try:
                task = asyncio.ensure_future(awaited(call_reward(function, args, inputs, logged)))
                # asyncio.wait_for would raise TimeoutError, which the function itself can raise too.
                done, _ = await asyncio.wait([task], timeout=seconds)
                if not done:
                    task.cancel()
                    return "timeout", None
                return logged.added_to(check_values(task.result(), logged.num_rows))
            except BaseException:
                return _error_outcome()

        async def all_outcomes() -> list[tuple[Any, ...]]:
            # Copies: the functions run at the same time, and one that changes its arguments must not change those of another.
            return await asyncio.gather(*(outcome_of(key, copy.deepcopy(inputs)) for key, inputs in calls))

        return "ok", self.loop.run_until_complete(all_outcomes())


async def awaited(values: Any) -> Any:
    return await values


def main(descriptor: int, parent: int) -> None:
    """Answer requests from the connection on file ``descriptor`` until it ends; ``parent`` is the process id of the other end."""
    end_with_parent()
    if os.getppid() != parent:  # the parent ended before end_with_parent() took effect
        os._exit(1)
    os.set_inheritable(descriptor, False)  # programs that a reward starts do not get the connection
    connection = socket.socket(fileno=descriptor).makefile("rwb")
    worker, own_id = Worker(), os.getpid()
    while header := connection.read(HEADER.size):
        job, length = HEADER.unpack(header)
        body = connection.read(length)
        try:
            request = pickle.loads(body)
        except Exception as error:  # a class of a script or a notebook, which this process cannot import
            answer = "error", f"the rows cannot be read in the worker process of the rewards: {error}"
        else:
            answer = worker.answer(request)
        if os.getpid() != own_id:  # a child that a reward forked has returned from the reward; it must not answer too
            os._exit(0)
        with contextlib.suppress(Exception):  # a reward may have closed or replaced sys.stdout
            sys.stdout.flush()
        message = pickle.dumps(answer)
        connection.write(HEADER.pack(job, len(message)) + message)
        connection.flush()

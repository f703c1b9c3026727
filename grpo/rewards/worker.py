"""The worker process that runs reward functions: it answers one request after another until the connection to its parent ends.

The worker imports no torch unless a reward does, and calls every function in its main thread, because ``math_verify`` and others use
SIGALRM. Text that a function prints goes to the worker's stdout and stderr, never to the connection.

A request is a tuple; the answer is ``(kind, value)``:

| request | answer |
|---|---|
| ``("load", key, spec, args)`` | ``("ok", FunctionInfo)`` or ``("invalid", message)`` |
| ``("call", key, inputs)`` | an outcome |
| ``("gather", [(key, inputs), ...], seconds)`` | ``("ok", [outcome, ...])``: coroutines that ran concurrently |

An outcome is ``("ok", [float | None] * B)``, ``("error", traceback)``, ``("timeout", None)`` or ``("contract", message)``.
"""

import asyncio
import contextlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from grpo.rewards.registry import accepted_columns, check_arguments, is_async, load_reward, needed_columns, source_files
from grpo.system import end_with_parent

MAX_TRACEBACK_LENGTH = 8000


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

    def __len__(self) -> int:
        return len(self.completions)

    def row(self, index: int) -> "RewardInputs":
        """Row ``index`` as a batch of one."""
        part = slice(index, index + 1)
        columns = {name: values[part] for name, values in self.columns.items()}
        ids = None if self.completion_ids is None else self.completion_ids[part]
        return RewardInputs(self.prompts[part], self.completions[part], columns, ids)


def call_reward(function: Callable[..., Any], args: dict[str, Any], inputs: RewardInputs) -> Any:
    """Call a reward by keyword, as TRL does, with all inputs that it accepts. An entry of ``args`` replaces a column of that name."""
    given = dict(prompts=inputs.prompts, completions=inputs.completions, completion_ids=inputs.completion_ids)
    keywords: dict[str, Any] = {**inputs.columns, **given, **args}
    accepted, _ = accepted_columns(function)
    return function(**{name: value for name, value in keywords.items() if accepted is None or name in accepted})


def check_values(values: Any, num_rows: int) -> tuple[str, Any]:
    """Turn the return value of a reward into an outcome: one float or ``None`` per row. NaN becomes ``None``.

    Lists, tuples, arrays and tensors of numbers of any type are accepted. A string, an infinite value or another length is a
    ``"contract"`` outcome; nothing is guessed.
    """
    expected = f"expected a list of {num_rows} values, each a float or None, one per completion"
    if hasattr(values, "tolist"):  # numpy, torch
        values = values.tolist()
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
        if isinstance(number, (str, bytes)) or number in (math.inf, -math.inf):
            kind = type(value).__name__
            return "contract", f"returned {_short_repr(value)} of type {kind} for completion {row}; {expected}"
        checked.append(None if number is None or math.isnan(number) else number)
    return "ok", checked


def _short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


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

    def load(self, key: int, spec: str, args: dict[str, Any]) -> tuple[str, Any]:
        try:
            function = load_reward(spec)
            check_arguments(spec, function, args)
            if function.__module__.startswith("grpo.rewards."):
                # Built-in rewards check their arguments before any row, so a call without rows checks them.
                call_reward(function, args, RewardInputs([], [], {}, []))
        except ValueError as error:
            message = str(error)
            return "invalid", message if spec in message else f"reward {spec!r}: {message}"
        self.functions[key] = (function, args)
        row_by_row = bool(getattr(function, "row_by_row", False))
        return "ok", FunctionInfo(
            is_async(function), row_by_row, needed_columns(spec, function, args), source_files(spec, function)
        )

    def call(self, key: int, inputs: RewardInputs) -> tuple[str, Any]:
        function, args = self.functions[key]
        try:
            values = call_reward(function, args, inputs)
            if inspect.isawaitable(values):
                values = self.loop.run_until_complete(_awaited(values))
        except BaseException:
            return _error_outcome()
        return check_values(values, len(inputs))

    def gather(self, calls: list[tuple[int, RewardInputs]], seconds: float) -> tuple[str, Any]:
        async def outcome_of(key: int, inputs: RewardInputs) -> tuple[str, Any]:
            function, args = self.functions[key]
            try:
                task = asyncio.ensure_future(_awaited(call_reward(function, args, inputs)))
                # asyncio.wait_for would raise TimeoutError, which the function itself can raise too.
                done, _ = await asyncio.wait([task], timeout=seconds)
                if not done:
                    task.cancel()
                    return "timeout", None
                return check_values(task.result(), len(inputs))
            except BaseException:
                return _error_outcome()

        async def all_outcomes() -> list[tuple[str, Any]]:
            return await asyncio.gather(*(outcome_of(key, inputs) for key, inputs in calls))

        return "ok", self.loop.run_until_complete(all_outcomes())


async def _awaited(values: Any) -> Any:
    return await values


def main(descriptor: int, parent: int) -> None:
    """Answer requests from the connection on file ``descriptor`` until it ends; ``parent`` is the process id of the other end."""
    end_with_parent()
    if os.getppid() != parent:  # the parent ended before end_with_parent() took effect
        os._exit(1)
    connection = Connection(descriptor)
    worker = Worker()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        answer = worker.answer(request)
        with contextlib.suppress(Exception):  # a reward may have closed or replaced sys.stdout
            sys.stdout.flush()
        connection.send(answer)

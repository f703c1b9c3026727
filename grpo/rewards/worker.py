"""The process that runs reward functions: reads jobs from a private connection, answers each, until the other end is gone.

It is started by ``process.py`` with the parent's ``sys.path`` and working folder, imports no torch of its own, and calls every
function in its main thread (``math_verify`` and others use SIGALRM). What a function prints goes to the process's stdout and
stderr, never to the connection.

A job is a tuple; the answer is ``(kind, value)``:

| job | answer |
|---|---|
| ``("load", key, spec, args)`` | ``("ok", FunctionInfo)`` or ``("invalid", one line)`` |
| ``("call", key, payload)`` | an outcome |
| ``("gather", [(key, payload), ...], seconds)`` | ``("ok", [outcome, ...])``: coroutines awaited together |

An outcome is ``("ok", [float | None] * B)``, ``("error", traceback)``, ``("timeout", None)`` or ``("contract", one line)``.
"""

import asyncio
import contextlib
import ctypes
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from grpo.rewards.registry import accepted_columns, check_arguments, is_async, load_reward, needed_columns

LONGEST_TRACEBACK = 8000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class FunctionInfo:
    """What the parent needs to know of a function it never imports."""

    is_async: bool
    row_by_row: bool
    """The function asked (``fn.row_by_row = True``) never to be given a whole batch."""
    needed: frozenset[str]
    """Columns it cannot do without."""


@dataclass(frozen=True)
class Payload:
    """The rows of one call; ``B`` prompts, completions and values per column."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: dict[str, Sequence[Any]]
    completion_ids: Sequence[Sequence[int]] | None = None

    def __len__(self) -> int:
        return len(self.completions)

    def row(self, index: int) -> "Payload":
        """Row ``index`` alone, as a batch of one."""
        part = slice(index, index + 1)
        return Payload(
            self.prompts[part],
            self.completions[part],
            {name: values[part] for name, values in self.columns.items()},
            None if self.completion_ids is None else self.completion_ids[part],
        )


def call_reward(function: Callable[..., Any], args: dict[str, Any], payload: Payload) -> Any:
    """Call by keyword, as TRL does, with everything offered that the function accepts; ``args`` win over columns."""
    offered: dict[str, Any] = {**payload.columns, "prompts": payload.prompts, "completions": payload.completions}
    offered["completion_ids"] = payload.completion_ids
    offered.update(args)
    accepted, _ = accepted_columns(function)
    return function(**{name: value for name, value in offered.items() if accepted is None or name in accepted})


def check_values(values: Any, rows: int) -> tuple[str, Any]:
    """What a function returned, as an outcome: one float or ``None`` per row; NaN is ``None``.

    Lists, tuples, arrays and tensors are accepted, and any number in them; a string, infinity, or another length is a
    contract error, never a guess.
    """
    expected = f"expected a list of {rows} values, each a float or None, one per completion"
    if hasattr(values, "tolist"):  # numpy, torch
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        return "contract", f"returned {_shown(values)} of type {type(values).__name__}; {expected}"
    if len(values) != rows:
        return "contract", f"returned {len(values)} values for {rows} completions: {_shown(values)}; {expected}"
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
            return "contract", f"returned {_shown(value)} of type {kind} for completion {row}; {expected}"
        checked.append(None if number is None or math.isnan(number) else number)
    return "ok", checked


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


def _raised() -> tuple[str, str]:
    text = traceback.format_exc()
    return "error", text if len(text) <= LONGEST_TRACEBACK else "...\n" + text[-LONGEST_TRACEBACK:]


class Worker:
    """Functions by key, and one event loop for all coroutines (clients that live across calls are bound to a loop)."""

    def __init__(self) -> None:
        self.functions: dict[int, tuple[Callable[..., Any], dict[str, Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    def answer(self, job: tuple[Any, ...]) -> tuple[str, Any]:
        if job[0] == "load":
            return self.load(*job[1:])
        if job[0] == "call":
            return self.call(*job[1:])
        assert job[0] == "gather", job[0]
        return self.gather(*job[1:])

    def load(self, key: int, spec: str, args: dict[str, Any]) -> tuple[str, Any]:
        try:
            function = load_reward(spec)
            check_arguments(spec, function, args)
            if function.__module__.startswith("grpo.rewards."):
                # Built-ins check their arguments before they look at a row.
                call_reward(function, args, Payload([], [], {}, []))
        except ValueError as error:
            message = str(error)
            return "invalid", message if spec in message else f"reward {spec!r}: {message}"
        self.functions[key] = (function, args)
        row_by_row = bool(getattr(function, "row_by_row", False))
        return "ok", FunctionInfo(is_async(function), row_by_row, needed_columns(spec, function, args))

    def call(self, key: int, payload: Payload) -> tuple[str, Any]:
        function, args = self.functions[key]
        try:
            values = call_reward(function, args, payload)
            if inspect.isawaitable(values):
                values = self.loop.run_until_complete(_awaited(values))
        except BaseException:
            return _raised()
        return check_values(values, len(payload))

    def gather(self, jobs: list[tuple[int, Payload]], seconds: float) -> tuple[str, Any]:
        async def one(key: int, payload: Payload) -> tuple[str, Any]:
            function, args = self.functions[key]
            task = asyncio.ensure_future(_awaited(call_reward(function, args, payload)))
            # Not wait_for: a TimeoutError of the function's own must not be taken for ours.
            done, _ = await asyncio.wait([task], timeout=seconds)
            if not done:
                task.cancel()
                return "timeout", None
            try:
                return check_values(task.result(), len(payload))
            except BaseException:
                return _raised()

        async def guarded(key: int, payload: Payload) -> tuple[str, Any]:
            try:
                return await one(key, payload)
            except Exception:
                return _raised()

        async def together() -> list[tuple[str, Any]]:
            return list(await asyncio.gather(*(guarded(key, payload) for key, payload in jobs)))

        return "ok", self.loop.run_until_complete(together())


async def _awaited(values: Any) -> Any:
    return await values


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux); elsewhere the end of the connection has to do."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Answer jobs from the connection on ``descriptor`` until it ends."""
    die_with(parent)
    connection = Connection(descriptor)
    worker = Worker()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        answer = worker.answer(job)
        with contextlib.suppress(Exception):  # a reward may have closed or replaced it
            sys.stdout.flush()
        connection.send(answer)

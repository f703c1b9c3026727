"""The objects that one process has loaded, and its answers to requests about them.

A worker process runs :func:`serve`. It calls every object in its main thread, because
``math_verify`` and others use SIGALRM. The trainer's process has a :class:`Host` too, for the
objects that no other process can load.
"""

import asyncio
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from grpo.system import UserError, end_with_parent, first_line, ignore_broken_pipes

MAX_TRACEBACK_LENGTH = 8000
HOST = "host"
"""The key of the host itself, which answers the request to load an object."""
CAUGHT = (Exception, SystemExit, asyncio.CancelledError)
"""The exceptions of an object that cost one request. Any other, such as KeyboardInterrupt, ends a
worker process."""


@dataclass(frozen=True)
class Source:
    """The way to load an object: ``make(objects, *arguments, user_object)``.

    ``objects`` has all objects of the process by key.
    """

    make: Callable[..., Any]
    arguments: tuple[Any, ...]
    user_object: Any = None
    """An object of the user's program; bytes are a pickled one. Default: none."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled apart from the rest, so that an object which a worker cannot unpickle is an error
        # of its request, and not of the connection.
        data = None if self.user_object is None else cloudpickle.dumps(self.user_object)
        return Source, (self.make, self.arguments, data)


@dataclass(frozen=True)
class Request:
    """A call of a method of a loaded object."""

    key: Hashable
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The result of one request."""

    kind: str = "ok"
    """``"ok"``; ``"error"``: the object raised; ``"timeout"``; ``"died"``: the worker process
    ended, or ``"skipped"``: the request was not made."""
    value: Any = None
    """The result of the method. For an error: the exception, if it is a :class:`UserError`."""
    message: str = ""
    """The text of an exception, or the cause of a timeout or a death."""
    error: str = ""
    """Type and message of an exception, in one line."""
    trace: str = ""
    """The traceback of an exception, from the user's code on."""
    is_worker_lost: bool = False
    """True if the worker process ended, and what it kept with it."""


class Host:
    """Loads objects and calls their methods, which may return awaitables."""

    has_ended = False

    def __init__(self):
        self.objects: dict[Hashable, Any] = {HOST: self}
        self.loaded = {HOST}
        """The keys of the objects, to which the :class:`grpo.workers.pool.Worker` that asks
        adds."""
        # One event loop for all coroutines, because an HTTP client is bound to its loop.
        self._runner = asyncio.Runner()

    def load(self, key: Hashable, source: Source) -> None:
        """Load an object under a key."""
        user_object = source.user_object
        if isinstance(user_object, bytes):
            user_object = pickle.loads(user_object)
        self.objects[key] = source.make(self.objects, *source.arguments, user_object)

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Call one method after the other, then await together what they returned as awaitables.

        Each awaitable is cancelled after ``limit_s`` seconds. Nothing else is stopped here.
        """
        answers = []
        waiting = {}
        for number, request in enumerate(requests):
            answer = self._call(request)
            answers.append(answer)
            if inspect.isawaitable(answer.value):
                waiting[number] = answer.value
        if waiting:
            finished = self._runner.run(_finish_all(waiting.values(), limit_s))
            for number, answer in zip(waiting, finished, strict=True):
                answers[number] = answer
        return answers

    def _call(self, request: Request) -> Answer:
        target = self.objects[request.key]
        try:
            return Answer(value=getattr(target, request.method)(*request.arguments))
        except CAUGHT as error:
            return failure(error, target)


def failure(error: BaseException, target: Any = None) -> Answer:
    """Return the answer for an exception of ``target``."""
    # The traceback begins with the user's code: the user knows nothing of the frames of this file
    # and of the class that wraps the user's function.
    ours = {__file__, getattr(sys.modules[type(target).__module__], "__file__", None)}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(trace)))
    return Answer(
        "error",
        value=error if isinstance(error, UserError) else None,
        message=str(error),
        error=f"{type(error).__name__}: {first_line(error)}",
        trace=text[-MAX_TRACEBACK_LENGTH:],
    )


def then(result: Any, convert: Callable[[Any], Any]) -> Any:
    """Return ``convert(result)``; if the result is awaitable, an awaitable of it."""
    if not inspect.isawaitable(result):
        return convert(result)

    async def finish() -> Any:
        value = convert(await result)
        return await value if inspect.isawaitable(value) else value

    return finish()


async def _finish_all(waiting: Iterable[Awaitable[Any]], limit_s: float) -> list[Answer]:
    tasks = [_finish(awaitable, limit_s) for awaitable in waiting]
    finished = await asyncio.gather(*tasks, return_exceptions=True)
    # A task may have cancelled itself.
    return [each if isinstance(each, Answer) else failure(each) for each in finished]


async def _finish(awaitable: Awaitable[Any], limit_s: float) -> Answer:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return Answer(value=await awaitable)
    except CAUGHT as error:
        if limit.expired():
            # A thread of asyncio.to_thread may still hang, so the next calls get new threads.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
            return Answer("timeout", message=f"it did not return within {limit_s:g} s")
        return failure(error)


def serve(descriptor: int, parent: int) -> None:
    """Answer requests from the connection on file ``descriptor`` until it ends.

    ``parent``: process id of the other end, with which this process ends.
    """
    end_with_parent()
    # What an object prints is no reason to fail.
    ignore_broken_pipes()
    if os.getppid() != parent:  # the parent ended before end_with_parent() took effect
        os._exit(1)
    # Programs that an object starts do not get the connection.
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    own_id = os.getpid()
    host = Host()
    while True:
        requests, limit_s = connection.recv()
        answers = host.ask(requests, limit_s)
        # A child that an object forked has returned from the call, too. It must not answer a second
        # time.
        if os.getpid() != own_id:
            os._exit(0)
        try:
            connection.send(answers)
        except Exception as error:  # of any type: what an object returned cannot be pickled
            connection.send([failure(error)] * len(answers))

"""The code of a worker process: it loads objects, calls their methods, and sends the answers.

The process runs :func:`serve`, a loop around one :class:`Host`. All objects are called in its main
thread, because ``math_verify`` and others use SIGALRM, which only works there. The trainer's
process has a :class:`Host` too, for the objects that no other process can load.
"""

import asyncio
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from grpo.system import UserError, end_with_parent, first_line, ignore_broken_pipes
from grpo.workers.protocol import HOST_KEY, Answer, Factory, Request

MAX_TRACEBACK_LENGTH = 8000
"""Characters of a traceback, the last ones, that an answer has."""
REQUEST_ERRORS = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions that make one request fail. Any other, such as KeyboardInterrupt, ends the process."""


class Host:
    """The objects of one process, by their keys.

    In the trainer's process, a Host takes the place of a
    :class:`grpo.workers.process.WorkerProcess`, so it has the same ``ask`` and ``has_ended``.
    """

    has_ended = False

    def __init__(self):
        self.objects: dict[Hashable, Any] = {HOST_KEY: self}
        # One event loop for all coroutines, because an HTTP client is bound to its loop.
        self._runner = asyncio.Runner()

    def load(self, key: Hashable, factory: Factory) -> None:
        """Load an object under a key."""
        user_object = factory.user_object
        if isinstance(user_object, bytes):
            user_object = pickle.loads(user_object)
        arguments = (*factory.arguments, user_object)
        self.objects[key] = factory.make(self.objects, *arguments)

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Call one method after the other, then await those results that are awaitables, together.

        Each awaitable is cancelled after ``limit_s`` seconds. Nothing else is stopped here: a
        method that hangs is ended from outside, with its process.
        """
        answers = [self._call(request) for request in requests]
        if any(inspect.isawaitable(answer.value) for answer in answers):
            answers = self._runner.run(_await_all(answers, limit_s))
        return answers

    def _call(self, request: Request) -> Answer:
        target = self.objects[request.key]
        try:
            method = getattr(target, request.method)
            value = method(*request.arguments)
            return Answer(value=value)
        except REQUEST_ERRORS as error:
            return error_answer(error, target)


def error_answer(error: BaseException, target: Any = None) -> Answer:
    """Return the answer for an exception of ``target``."""
    # The traceback begins with the user's code: the user knows nothing of the frames of this file
    # and of the class that wraps the user's function.
    target_module = sys.modules[type(target).__module__]
    hidden_files = {__file__, getattr(target_module, "__file__", None)}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in hidden_files:
        trace = trace.tb_next
    shown_error = error.with_traceback(trace)
    lines = traceback.format_exception(shown_error)
    text = "".join(lines)
    user_error = error if isinstance(error, UserError) else None
    return Answer(
        "error",
        value=user_error,
        message=str(error),
        error=f"{type(error).__name__}: {first_line(error)}",
        trace=text[-MAX_TRACEBACK_LENGTH:],
    )


def convert_result(result: Any, convert: Callable[[Any], Any]) -> Any:
    """Return ``convert(result)``; for an awaitable result, an awaitable of that.

    With it, a loaded object wraps functions of the user that may be async or not.
    """
    if not inspect.isawaitable(result):
        return convert(result)

    async def finish() -> Any:
        return convert(await result)

    return finish()


async def _await_all(answers: Sequence[Answer], limit_s: float) -> list[Answer]:
    tasks = [_await_value(answer, limit_s) for answer in answers]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results):
        # A task that cancels itself and then returns has a CancelledError as its result, which
        # _await_value() does not see.
        if not isinstance(result, Answer):
            results[number] = error_answer(result)
    return results


async def _await_value(answer: Answer, limit_s: float) -> Answer:
    """Return an answer whose value, if it was awaitable, has been awaited."""
    if not inspect.isawaitable(answer.value):
        return answer
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            value = await answer.value
            return Answer(value=value)
    except REQUEST_ERRORS as error:
        if limit.expired():
            # A thread of asyncio.to_thread cannot be cancelled and may hang for ever. With new
            # threads, later calls do not wait for a free one.
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor())
            return Answer("timeout", message=f"it did not return within {limit_s:g} s")
        return error_answer(error)


def serve(descriptor: int, parent: int) -> None:
    """Answer requests until the connection closes.

    Args:
        descriptor: file descriptor of the connection to the trainer.
        parent: process id of the trainer, with which this process ends.
    """
    end_with_parent()
    # The trainer may have ended before the kernel was told, just above.
    if os.getppid() != parent:
        os._exit(1)
    # An object may print although nobody reads the trainer's stderr any more.
    ignore_broken_pipes()
    # Programs that an object starts do not get the connection.
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    process_id = os.getpid()
    host = Host()
    while True:
        requests, limit_s = connection.recv()
        answers = host.ask(requests, limit_s)
        # A child that an object has forked returns from the call, too. Its answer would be taken
        # for that of the next request.
        if os.getpid() != process_id:
            os._exit(0)
        try:
            connection.send(answers)
        except Exception as error:  # of any type: what an object returned cannot be pickled
            answer = error_answer(error)
            connection.send([answer] * len(answers))

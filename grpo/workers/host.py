"""The code of a worker process: it loads objects, calls their methods, and sends the answers.

The process runs :func:`serve`, a loop around one :class:`Host`. All objects are called in its main
thread, because ``math_verify`` and others use SIGALRM, which only works there. The trainer's
process has a :class:`Host` too, for the objects that no worker process can load.

A loaded object is always of a class of grpo, such as a reward function's wrapper, which calls the
user's function or class.
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
"""Number of characters of a traceback that an answer has. The end is kept, since it says most."""
REQUEST_ERRORS = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions that make one request fail. Others, such as KeyboardInterrupt, end the process."""


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
        """Make an object, and keep it under a key."""
        user_object = factory.user_object
        # In the trainer's process the factory has not been pickled, so this is the object itself.
        if isinstance(user_object, bytes):
            user_object = pickle.loads(user_object)
        arguments = (*factory.arguments, user_object)
        self.objects[key] = factory.make(self.objects, *arguments)

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Call one method after the other. Then await together the results that are awaitables.

        Each awaitable is cancelled ``limit_s`` seconds after all methods have been called. Nothing
        else is stopped here: a method that hangs is ended from outside, with its process. The
        trainer allows ``limit_s`` and :data:`grpo.workers.process.GRACE_SECONDS` for calls and
        awaitables together. So after long calls it may kill the process before an awaitable reaches
        its limit.
        """
        answers = [self._call(request) for request in requests]
        if any(inspect.isawaitable(answer.value) for answer in answers):
            answers = self._runner.run(_await_all(answers, limit_s))
        return answers

    def _call(self, request: Request) -> Answer:
        """Call a method. The answer's value may be an awaitable, which :meth:`ask` then awaits."""
        # Outside the try: a key that is not loaded is a mistake of grpo and ends the process.
        target = self.objects[request.key]
        try:
            method = getattr(target, request.method)
            value = method(*request.arguments)
            return Answer(value=value)
        except REQUEST_ERRORS as error:
            return error_answer(error, target)


def error_answer(error: BaseException, target: Any = None) -> Answer:
    """Return the answer for an exception.

    Args:
        target: the loaded object whose method raised the exception while it was called. Default: no
            object, for an exception of an awaitable or of a message that cannot be pickled.
    """
    # At its beginning, the traceback has frames of this file and of the file that defines the
    # target's class, which the user does not know. These frames are left out.
    target_module = sys.modules.get(type(target).__module__)
    # If the target is None, the module is builtins, which has no file.
    hidden_files = {__file__, getattr(target_module, "__file__", None)}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in hidden_files:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
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
    """Return ``convert(result)``. If the result is awaitable, return an awaitable that awaits the
    result and then converts it.

    Loaded objects call this with the result of a user's function, which may be sync or async.
    """
    if not inspect.isawaitable(result):
        return convert(result)

    async def finish() -> Any:
        return convert(await result)

    return finish()


async def _await_all(answers: Sequence[Answer], limit_s: float) -> list[Answer]:
    coroutines = [_await_value(answer, limit_s) for answer in answers]
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    # The user's coroutine may cancel its own task and return without another await. asyncio then
    # raises CancelledError in place of the return value of _await_value(), whose except clause
    # never sees it. So the error is among these results.
    return [
        result if isinstance(result, Answer) else error_answer(result)
        for result in results
    ]  # fmt: skip


async def _await_value(answer: Answer, limit_s: float) -> Answer:
    """Return an answer with the awaited value; an answer without an awaitable as it is."""
    if not inspect.isawaitable(answer.value):
        return answer
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            value = await answer.value
            return Answer(value=value)
    except REQUEST_ERRORS as error:
        if limit.expired():
            # The awaitable may wait for a thread (asyncio.to_thread), which cannot be cancelled and
            # may hang for ever. The default executor has few threads, and later awaitables would
            # wait for a free one. So they get a new executor.
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor())
            return Answer("timeout", message=f"it did not return within {limit_s:g} s")
        return error_answer(error)


def serve(descriptor: int, parent: int) -> None:
    """Answer requests until this process is killed, or the trainer closes the connection.

    If one answer to a list of requests cannot be pickled, each request of the list gets the
    pickling error as its answer.

    Args:
        descriptor: file descriptor of the connection to the trainer.
        parent: process id of the trainer, with which this process ends.
    """
    end_with_parent()
    # The trainer may have ended before the line above asked the kernel for this. Then this process
    # has another parent already. If a child of the trainer holds the connection open, nothing would
    # end this process.
    if os.getppid() != parent:
        os._exit(1)
    # If nobody reads the trainer's stderr any more, printing would raise an error in each object.
    ignore_broken_pipes()
    # Programs that an object starts must not get the connection: they could keep it open.
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    process_id = os.getpid()
    host = Host()
    while True:
        try:
            requests, limit_s = connection.recv()
        except EOFError:  # the trainer has ended
            return
        answers = host.ask(requests, limit_s)
        # If a method forks and its child also returns, the child comes here too. An answer of the
        # child would be taken for the answer to the next requests.
        if os.getpid() != process_id:
            os._exit(0)
        try:
            connection.send(answers)
        except Exception as error:
            # A value or an exception may be of a class that the user defined. Such a class decides
            # how it is pickled, so it may raise any exception.
            answer = error_answer(error)
            connection.send([answer] * len(answers))

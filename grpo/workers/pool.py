"""Workers, each with a process that starts when it is needed and again after it has ended.

:class:`Pool` knows the sources of all objects, and each worker loads those that it is asked about.
:class:`Here` takes the place of a worker for objects that only this process has.
"""

import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from grpo.workers.host import HOST, Answer, Host, Request, Source
from grpo.workers.process import WorkerProcess

LOAD_SECONDS = 120.0
"""Time limit for starting a worker and loading an object, which may import a whole library."""
CLOSE_SECONDS = 5.0
"""Time limit of the last requests to all workers of a pool."""


class Worker:
    """A process that answers, and the thread that starts it and waits for the answers.

    The thread lives as long as the process, because the kernel kills a process when the thread that
    started it ends (:func:`grpo.system.end_with_parent`).
    """

    def __init__(
        self,
        sources: Mapping[Hashable, Source],
        start: Callable[[], WorkerProcess | Host],
    ):
        self._sources = sources
        self._start = start
        self._is_closing = False
        self._thread: ThreadPoolExecutor | None = None
        self._process: WorkerProcess | Host | None = None

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job in the worker's thread, after those before it. Jobs may call :meth:`ask`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "worker")
        return self._thread.submit(job, *arguments)

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Return the answers to requests, which are made together.

        A process that does not answer in time is killed.
        """
        if self._is_closing:
            answer = Answer("died", message="its worker is closing", is_worker_lost=True)
            return [answer] * len(requests)
        process = self._process
        if process is None or process.has_ended:
            self.end()
            process = self._process = self._start()
            if self._is_closing:  # since the line above
                self.end()
        for request in requests:
            key = request.key
            if key in process.loaded:
                continue
            load = Request(HOST, "load", (key, self._sources[key]))
            (answer,) = process.ask([load], LOAD_SECONDS)
            if answer.kind != "ok":
                return [answer] * len(requests)
            process.loaded.add(key)
        return process.ask(requests, limit_s)

    def say_goodbye(self, request: Request) -> None:
        """Make the last request, if a running process has its object."""
        process = self._process
        if process is not None and not process.has_ended and request.key in process.loaded:
            process.ask([request], CLOSE_SECONDS)

    def end(self) -> None:
        """Kill the process and forget its connection. A later request starts another."""
        process = self._process
        self._process = None
        if process is not None:
            process.end()

    def refuse(self) -> None:
        """Kill the process, and start no other for the jobs that wait or run."""
        self._is_closing = True
        self.end()

    def close(self) -> None:
        """Kill the process and end the thread, without the jobs that wait.

        A later job starts others.
        """
        self.refuse()
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        self._is_closing = False


class Here(Worker):
    """Answers in this process and in the calling thread.

    Nothing is killed here, only awaitables are cancelled.
    """

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job at once."""
        done = Future()
        done.set_result(job(*arguments))
        return done


class Pool:
    """Workers, and a place in this process for the objects that no worker can load.

    Args:
        num_workers: number of worker processes.
    """

    def __init__(self, num_workers: int):
        self._sources: dict[Hashable, Source] = {}
        # The working folder is that of the beginning, so that relative paths stay valid.
        start = functools.partial(WorkerProcess, os.getcwd())
        self.workers = tuple(Worker(self._sources, start) for _ in range(num_workers))
        self.here = Here(self._sources, Host)
        self.keys_here: set[Hashable] = set()
        """The objects that no worker can load."""
        self.notes: list[str] = []
        """Messages of :meth:`load` for the user, one line each."""

    def load(
        self,
        what: str,
        key: Hashable,
        make: Callable[..., Any],
        *arguments: Any,
        user_object: Any = None,
        or_here: bool = False,
    ) -> Any:
        """Load an object in one worker. Returns its ``describe()``.

        Other workers load it when they are asked about it.

        Args:
            what: names the object in messages.
            make: see :class:`Source`.
            user_object: an object of the user's program. Default: none.
            or_here: True: it is loaded in this process if the worker cannot load it.

        Raises:
            ValueError: in one line, if it cannot be loaded at all.
        """
        self._sources[key] = Source(make, arguments, user_object)
        request = Request(key, "describe")
        worker = self.workers[0]
        (answer,) = worker.submit(worker.ask, [request], LOAD_SECONDS).result()
        # Not one that has hung or killed its worker: here it would do that to the trainer.
        if answer.kind == "error" and or_here:
            # It holds a connection, for example, or its class is not importable there.
            self.keys_here.add(key)
            self.notes.append(
                f"note: {what} runs in this process, where a hang cannot end: "
                f"it cannot be sent to a worker process ({answer.error})"
            )
            (answer,) = self.here.ask([request], LOAD_SECONDS)
        if answer.kind != "ok":
            message = answer.error.removeprefix("ValueError: ")
            message = message or f"{what} cannot be loaded: {answer.message}"
            raise ValueError(message if what in message else f"{what}: {message}")
        return answer.value

    def close(self, goodbye: Request | None = None) -> None:
        """End the workers. A later job starts others.

        ``goodbye``: the last request, which each worker gets if it has loaded its object.
        """
        if goodbye is not None:
            said = [worker.submit(worker.say_goodbye, goodbye) for worker in self.workers]
            # A worker that is busy, or whose object does not answer, is not waited for.
            wait(said, CLOSE_SECONDS)
        # All at once, since closing waits for the job that runs.
        for worker in self.workers:
            worker.refuse()
        for worker in self.workers:
            worker.close()

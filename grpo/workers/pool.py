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

    def say_goodbye(self, requests: Sequence[Request]) -> None:
        """Make the last requests, to those objects that a running process has."""
        process = self._process
        if process is not None and not process.has_ended:
            known = [request for request in requests if request.key in process.loaded]
            process.ask(known, CLOSE_SECONDS)

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

    def begin_step(self) -> None:
        """Print some output of the process again."""
        if self._process is not None:
            self._process.num_printed_bytes = 0


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
        memory_bytes: most bytes of data of each of them; 0: no limit.
    """

    def __init__(self, num_workers: int, memory_bytes: int = 0):
        self._sources: dict[Hashable, Source] = {}
        # The working folder is that of the beginning, so that relative paths stay valid.
        start = functools.partial(WorkerProcess, os.getcwd(), memory_bytes)
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
        here: bool = False,
    ) -> Any:
        """Load an object in one worker, or here if no worker can. Returns its ``describe()``.

        Other workers load it when they are asked about it.

        Args:
            what: names the object in messages.
            make: see :class:`Source`.
            user_object: an object of the user's program. Default: none.
            here: True: no worker loads it.

        Raises:
            ValueError: in one line, if it cannot be loaded at all.
        """
        self._sources[key] = Source(make, arguments, user_object)
        request = Request(key, "describe")
        first = self.here if here else self.workers[0]
        (answer,) = first.submit(first.ask, [request], LOAD_SECONDS).result()
        # Not one that has hung or killed its worker: here it would do that to the trainer.
        if answer.kind == "error" and user_object is not None:
            # It holds a connection, for example, or its class is not importable there.
            cause = answer.error
            (answer,) = self.here.ask([request], LOAD_SECONDS)
            here = True
            if answer.kind == "ok":
                self.notes.append(
                    f"note: {what} runs in this process, where a hang cannot end: "
                    f"it cannot be sent to a worker process ({cause})"
                )
        if answer.kind != "ok":
            message = answer.error.removeprefix("ValueError: ")
            message = message or f"{what} cannot be loaded: {answer.message}"
            raise ValueError(message if what in message else f"{what}: {message}")
        if here:
            self.keys_here.add(key)
        return answer.value

    def worker_of(self, key: Hashable, number: int) -> Worker:
        """Return the worker of a number, counted round and round, or :class:`Here` for an object
        that no worker can load.
        """
        if key in self.keys_here:
            return self.here
        return self.workers[number % len(self.workers)]

    def begin_step(self) -> None:
        """Let each worker print again."""
        for worker in self.workers:
            worker.begin_step()

    def close(self, goodbye: Sequence[Request] = ()) -> None:
        """End the workers. A later job starts others.

        ``goodbye``: the last requests, which each worker gets if it has loaded their objects.
        """
        if goodbye:
            said = []
            for worker in (*self.workers, self.here):
                said.append(worker.submit(worker.say_goodbye, goodbye))
            # A worker that is busy, or whose object does not answer, is not waited for.
            wait(said, CLOSE_SECONDS)
        # All at once, since closing waits for the job that runs.
        for worker in self.workers:
            worker.refuse()
        for worker in self.workers:
            worker.close()

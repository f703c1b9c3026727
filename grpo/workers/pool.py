"""Worker processes that start when they are needed and again after they have ended, and the objects that they load."""

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from grpo.workers.host import HOST, Answer, Host, Request, Source, failure
from grpo.workers.process import WorkerProcess

LOAD_SECONDS = 120.0
"""Time limit for starting a worker and loading an object, which may import a whole library."""
CLOSE_SECONDS = 5.0
"""Time limit of the last requests to all workers of a pool."""


class Worker:
    """A worker process, and the thread that starts it and waits for its answers.

    The thread lives as long as the process: the kernel kills a process when the thread that started it ends.
    """

    def __init__(self, sources: dict[Hashable, Source], memory_bytes: int):
        self._sources = sources
        self._memory_bytes = memory_bytes
        # The working folder is that of the beginning, so that relative paths stay valid.
        self._directory = os.getcwd()
        self._thread: ThreadPoolExecutor | None = None
        self._process: WorkerProcess | None = None

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job in the worker's thread, after those before it. Jobs may call :meth:`ask`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "worker")
        return self._thread.submit(job, *arguments)

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Return the answers to requests, which are sent together. A process that does not answer in time is killed."""
        for key in {request.key for request in requests}:
            loaded = self._load(key)
            if loaded.kind != "ok":
                return [loaded] * len(requests)
        return self._process.ask(requests, limit_s)

    def _load(self, key: Hashable) -> Answer:
        """Load an object, unless the process has it."""
        if self._process is None or self._process.has_ended:
            self.end()
            self._process = WorkerProcess(self._directory, self._memory_bytes)
        process = self._process
        if key in process.loaded:
            return Answer()
        try:
            source = self._sources[key].pickled()
        except Exception as error:  # of any type: each object may raise its own
            return failure(error)
        (answer,) = process.ask([Request(HOST, "load", (key, source))], LOAD_SECONDS)
        if answer.kind == "ok":
            process.loaded.add(key)
        return answer

    def begin_step(self) -> None:
        """Print some output of the process again."""
        if self._process is not None:
            self._process.num_printed_bytes = 0

    def say_goodbye(self, requests: Sequence[Request]) -> None:
        """Make the last requests, to those objects that the process has."""
        process = self._process
        if process is None or process.has_ended:
            return
        known = [request for request in requests if request.key in process.loaded]
        process.ask(known, CLOSE_SECONDS)

    def end(self) -> None:
        """Kill the process. A later request starts another."""
        if self._process is not None:
            self._process.end()

    def close(self) -> None:
        """Kill the process and end the thread, without the jobs that wait. A later job starts others."""
        thread = self._thread
        self._thread = None
        self.end()
        if thread is not None:
            thread.shutdown(cancel_futures=True)
            self.end()  # the thread's last job may have started another process


class Here:
    """Answers in this process and in the calling thread, without any limit: the way of a :class:`Worker`."""

    def __init__(self, sources: dict[Hashable, Source]):
        self._sources = sources
        self._host = Host()

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job at once."""
        done = Future()
        done.set_result(job(*arguments))
        return done

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Return the answers to requests. Only awaitables are cancelled at the limit."""
        for key in {request.key for request in requests} - self._host.objects.keys():
            request = Request(HOST, "load", (key, self._sources[key]))
            (loaded,) = self._host.answer([request], LOAD_SECONDS)
            if loaded.kind != "ok":
                return [loaded] * len(requests)
        return self._host.answer(requests, limit_s)


class Pool:
    """Workers, and a place in this process for the objects that no worker can load.

    Args:
        num_workers: number of worker processes.
        memory_bytes: most bytes of data of each of them; 0: no limit.
    """

    def __init__(self, num_workers: int, memory_bytes: int = 0):
        self._sources: dict[Hashable, Source] = {}
        self.workers = tuple(Worker(self._sources, memory_bytes) for _ in range(num_workers))
        self.here = Here(self._sources)
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
        """Return what ``describe()`` of an object says, which is loaded in one worker, or here if no worker can.

        Other workers load it when they need it.

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
        if answer.kind != "ok" and user_object is not None:
            reason = f"it cannot be sent to a worker process ({answer.error or answer.message})"
            (answer,) = self.here.ask([request], LOAD_SECONDS)
            here = True
            if answer.kind == "ok":
                self.notes.append(f"note: {what} runs in this process, where a hang cannot end: {reason}")
        if answer.kind != "ok":
            message = answer.error.removeprefix("ValueError: ") or f"{what} cannot be loaded: {answer.message}"
            raise ValueError(message if what in message else f"{what}: {message}")
        if here:
            self.keys_here.add(key)
        return answer.value

    def place(self, key: Hashable, number: int) -> Worker | Here:
        """Return the place of an object: this process, or else the worker of that number, counted round and round."""
        if key in self.keys_here:
            return self.here
        return self.workers[number % len(self.workers)]

    def begin_step(self) -> None:
        """Let each worker print again."""
        for worker in self.workers:
            worker.begin_step()

    def close(self, goodbye: Sequence[Request] = ()) -> None:
        """End the workers after the last requests to objects that they have loaded. A later job starts others."""
        if goodbye:
            self.here.ask([request for request in goodbye if request.key in self.keys_here], CLOSE_SECONDS)
            said = [worker.submit(worker.say_goodbye, goodbye) for worker in self.workers]
            wait(said, CLOSE_SECONDS)
        for worker in self.workers:
            worker.end()  # all at once: closing waits for each
        for worker in self.workers:
            worker.close()

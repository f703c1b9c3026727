"""The trainer's view of workers: a :class:`Worker` outlives each of its processes.

A worker starts a process for its first request, and a new one when it is asked again after that
process has ended. It loads an object when it is first asked about it. Some objects of the user
cannot be sent to another process: an :class:`InProcessWorker` takes the same requests for them.
"""

import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from grpo.workers.host import Host
from grpo.workers.process import WorkerProcess
from grpo.workers.protocol import HOST_KEY, Answer, Factory, Request

LOAD_SECONDS = 120.0
"""Time limit for starting a process and loading an object, which may import a large library."""
CLOSE_SECONDS = 5.0
"""Time limit of the last requests, before a pool kills its workers."""


class Worker:
    """One worker: a thread, and the process that the thread starts and asks.

    The thread lives as long as the process, because the kernel kills a process when the thread that
    started it ends (:func:`grpo.system.end_with_parent`).

    Args:
        factories: key of an object -> its factory. The pool adds to it.
        start: returns a new process; for an :class:`InProcessWorker`, a :class:`Host`.
    """

    def __init__(
        self,
        factories: Mapping[Hashable, Factory],
        start: Callable[[], WorkerProcess | Host],
    ):
        self._factories = factories
        self._start = start
        self._is_closing = False
        self._thread: ThreadPoolExecutor | None = None
        self._process: WorkerProcess | Host | None = None
        self._loaded_keys: set[Hashable] = set()
        """Keys of the objects that the process has loaded."""

    def submit(self, job: Callable, *arguments: Any) -> Future:
        """Run a job in the worker's thread, after all earlier ones. A job may call :meth:`ask`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "worker")
        return self._thread.submit(job, *arguments)

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Send requests together, and return their answers.

        Starts the process and loads the objects if need be. A process that does not answer within
        ``limit_s`` seconds is killed.
        """
        if self._is_closing:
            answer = Answer("died", message="its worker is closing", is_worker_lost=True)
            return [answer] * len(requests)

        # A local name, since another thread may close the worker and so reset self._process.
        process = self._process
        if process is None or process.has_ended:
            # An ended process still keeps its id and its socket.
            self.kill()
            process = self._process = self._start()
            self._loaded_keys.clear()
            # Closing may have begun during the start, when there was no process to kill.
            if self._is_closing:
                self.kill()

        for request in requests:
            key = request.key
            if key in self._loaded_keys:
                continue
            load = Request(HOST_KEY, "load", (key, self._factories[key]))
            (answer,) = process.ask([load], LOAD_SECONDS)
            if answer.status != "ok":
                return [answer] * len(requests)
            self._loaded_keys.add(key)
        return process.ask(requests, limit_s)

    def ask_if_loaded(self, request: Request) -> None:
        """Send a last request if a process has loaded its object."""
        process = self._process
        if process is not None and request.key in self._loaded_keys:
            process.ask([request], CLOSE_SECONDS)

    def kill(self) -> None:
        """Kill the process. The next request starts another."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()

    def begin_closing(self) -> None:
        """Kill the process, and start no other one for the jobs that run or wait."""
        self._is_closing = True
        self.kill()

    def close(self) -> None:
        """Kill the process, drop the jobs that wait, and end the thread.

        The worker can be used again afterwards.
        """
        self.begin_closing()
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        self._is_closing = False


class InProcessWorker(Worker):
    """A worker without a process or a thread: it answers in this process, in the calling thread.

    No call can be killed here. Only awaitables are cancelled at their time limit.
    """

    def submit(self, job: Callable, *arguments: Any) -> Future:
        """Run a job at once."""
        done = Future()
        done.set_result(job(*arguments))
        return done


class Pool:
    """Several workers that can load the same objects.

    Args:
        num_workers: number of worker processes.
    """

    def __init__(self, num_workers: int):
        self._factories: dict[Hashable, Factory] = {}
        # All processes start in the working folder of now, so that relative paths stay valid when
        # the program changes its folder.
        start = functools.partial(WorkerProcess, os.getcwd())
        self.workers = tuple(Worker(self._factories, start) for _ in range(num_workers))
        self.in_process_worker = InProcessWorker(self._factories, Host)
        self.in_process_keys: set[Hashable] = set()
        """Keys of the objects that no worker process can load."""
        self.notes: list[str] = []
        """Messages of :meth:`load` for the user, one line each."""

    def load(
        self,
        what: str,
        key: Hashable,
        make: Callable,
        *arguments: Any,
        user_object: Any = None,
        or_in_process: bool = False,
    ) -> Any:
        """Load an object in one worker, and return the result of its method ``describe``.

        Every other worker loads the object when it is first asked about it.

        Args:
            what: names the object in messages.
            make, arguments, user_object: see :class:`grpo.workers.protocol.Factory`.
            or_in_process: load the object in this process if a worker process cannot.

        Raises:
            ValueError: in one line, if it cannot be loaded at all.
        """
        self._factories[key] = Factory(make, arguments, user_object)
        request = Request(key, "describe")
        worker = self.workers[0]
        (answer,) = worker.submit(worker.ask, [request], LOAD_SECONDS).result()

        # Not after a timeout or a death: the object would do the same to this process.
        if answer.status == "error" and or_in_process:
            # The object holds a connection, for example, so that it cannot be pickled.
            self.in_process_keys.add(key)
            self.notes.append(
                f"note: {what} runs in this process, where a hang cannot end: "
                f"it cannot be sent to a worker process ({answer.error})"
            )
            (answer,) = self.in_process_worker.ask([request], LOAD_SECONDS)

        if answer.status == "ok":
            return answer.value
        message = answer.error.removeprefix("ValueError: ")
        if not message:  # a timeout or a death is no exception
            message = f"{what} cannot be loaded: {answer.message}"
        elif what not in message:
            message = f"{what}: {message}"
        raise ValueError(message)

    def close(self, last_request: Request | None = None) -> None:
        """Kill all workers. The pool can be used again afterwards.

        ``last_request``: sent first, to each worker that has loaded its object. Default: none.
        """
        if last_request is not None:
            futures = [worker.submit(worker.ask_if_loaded, last_request) for worker in self.workers]
            # A worker that is busy, or whose object does not answer, is not waited for any longer.
            wait(futures, CLOSE_SECONDS)
        # All are killed before one is waited for: close() waits for the job that runs, which ends
        # only when its process has been killed.
        for worker in self.workers:
            worker.begin_closing()
        for worker in self.workers:
            worker.close()

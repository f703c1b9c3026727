"""The trainer's view of workers: a :class:`Worker` outlives each of its processes.

A worker starts a process for its first request, and a new one if that process has ended when the
next request comes. It loads an object before the first request to it. Some objects of the user
cannot be sent to another process: an :class:`InProcessWorker` takes the same requests for them.

Only the thread of a worker calls :meth:`Worker.ask`, in jobs that were given to
:meth:`Worker.submit`. So each process answers one call of ``ask`` at a time. An
:class:`InProcessWorker` has no thread and answers in the thread that calls it.
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
"""Time limit of the last request that :meth:`Pool.close` sends before it kills the workers."""


class Worker:
    """One worker: a thread, and the process that the thread starts and asks.

    The thread lives as long as the process, because the kernel kills a process when the thread that
    started it ends (:func:`grpo.system.end_with_parent`).

    Args:
        factories: key of an object -> its factory. All workers of a pool share this mapping, to
            which the pool adds.
        start: returns a new process; for an :class:`InProcessWorker`, a :class:`Host`, which also
            has ``ask`` and ``has_ended``, and is never killed.
    """

    killed_by = "a reward function that took too long or ended the process"
    """The call at which the last process was lost, for messages."""

    def __init__(
        self,
        factories: Mapping[Hashable, Factory],
        start: Callable[[], WorkerProcess | Host],
    ):
        self._factories = factories
        self._start = start
        self._is_closing = False
        self._executor = ThreadPoolExecutor(1, "worker")
        """The worker's one thread, which starts with the first job."""
        self._process: WorkerProcess | Host | None = None
        self._loaded_keys: set[Hashable] = set()
        """Keys of the objects that the process has loaded."""

    def submit(self, job: Callable, *arguments: Any) -> Future:
        """Run a job in the worker's thread, after all earlier jobs.

        Only a job may call :meth:`ask` of this worker. An exception of the job is in the Future.
        """
        return self._executor.submit(job, *arguments)

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Send requests together, and return their answers.

        Starts the process and loads the objects if need be. If loading an object fails, every
        request gets the answer of that failed load. A process that does not answer within
        ``limit_s`` seconds is killed (:meth:`grpo.workers.process.WorkerProcess.ask`).
        """
        if self._is_closing:
            answer = Answer("died", message="its worker is closing", is_worker_lost=True)
            return [answer] * len(requests)

        # A local name, since another thread may close the worker and so reset self._process.
        process = self._process
        if process is None or process.has_ended:
            # A process that has ended may have left children in its process group.
            self.kill()
            process = self._process = self._start()
            self._loaded_keys.clear()
            # Another thread may have begun to close this worker during the start, when it found no
            # process to kill. So the process is killed here. Sending to it fails below, and each
            # request gets the answer "died".
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
        """Send a request if the process has loaded its object, and drop the answer.

        :meth:`Pool.close` sends its last request by this method: no process is started for it.
        """
        process = self._process
        # If the process has ended but a child that it forked still holds the connection, ask()
        # would wait in vain.
        if process and not process.has_ended and request.key in self._loaded_keys:
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
        executor = self._executor
        # For later jobs, since an executor that was shut down takes none.
        self._executor = ThreadPoolExecutor(1, "worker")
        executor.shutdown(cancel_futures=True)
        self._is_closing = False


class InProcessWorker(Worker):
    """A worker without a process or a thread: it answers in this process, in the calling thread.

    No call can be killed here. Only awaitables are cancelled at their time limit. A pool never
    closes this worker, since a :class:`Host` cannot be killed. So the objects that this worker has
    loaded stay loaded, and get no last request.
    """

    def submit(self, job: Callable, *arguments: Any) -> Future:
        """Run a job at once, and return a Future that is done.

        An exception of the job is raised here, not stored in the Future: the job runs in the
        caller's thread, so no other thread has to pass the exception on.
        """
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
        # Later processes start in the same working folder as the first, so that relative paths stay
        # valid if the program changes its working folder meanwhile.
        start = functools.partial(WorkerProcess, os.getcwd())
        self.workers = tuple(Worker(self._factories, start) for _ in range(num_workers))
        self.in_process_worker = InProcessWorker(self._factories, Host)
        self.in_process_keys: set[Hashable] = set()
        """Keys of the objects that no worker process can load. Callers send requests to these
        objects to ``in_process_worker``."""
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
        """Load an object in one worker, and return the result of the object's method ``describe``.

        Each object must have this method. Every other worker loads the object before the first
        request to it.

        Args:
            what: name of the object in messages, such as ``reward 'accuracy'``.
            key: key of the object in later requests. A pool loads one object per key.
            make, arguments, user_object: see :class:`grpo.workers.protocol.Factory`.
            or_in_process: load the object in this process if loading fails in a worker process.

        Raises:
            ValueError: if the object cannot be loaded at all. The message is one line.
        """
        self._factories[key] = Factory(make, arguments, user_object)
        request = Request(key, "describe")
        worker = self.workers[0]
        (answer,) = worker.submit(worker.ask, [request], LOAD_SECONDS).result()

        # Not after a timeout or a death: the object would do the same to this process.
        if answer.status == "error" and or_in_process:
            # Usually the object cannot be pickled, since it holds a connection, for example, or the
            # worker cannot unpickle it. The note below says so. Errors of another kind are
            # possible: most are raised in this process too, and then there is no note. An object
            # that fails only in a worker gets the note, with its error as the reason.
            reason = answer.error
            (answer,) = self.in_process_worker.ask([request], LOAD_SECONDS)
            if answer.status == "ok":
                self.in_process_keys.add(key)
                self.notes.append(
                    f"note: {what} runs in this process, where a hang cannot end: "
                    f"it cannot be sent to a worker process ({reason})"
                )

        if answer.status == "ok":
            return answer.value
        # The type of the exception that is raised here says "ValueError" already.
        message = answer.error.removeprefix("ValueError: ")
        if not message:
            # A timeout or a death is no exception, so answer.error is empty.
            message = f"{what} cannot be loaded: {answer.message}"
        elif what not in message:
            # The user must see which object the message is about. Some messages name it themselves.
            message = f"{what}: {message}"
        # The object holds what no other process can have: a connection or a lock, for example.
        if "pickle" in message:
            message += "; write it into a file, from which each worker loads its own"
        raise ValueError(message)

    def close(self, last_request: Request | None = None) -> None:
        """Kill all worker processes. The pool can be used again afterwards.

        Args:
            last_request: sent before that, to each worker process that has loaded the object of the
                request. The answers are dropped. Default: none.
        """
        if last_request is not None:
            futures = [worker.submit(worker.ask_if_loaded, last_request) for worker in self.workers]
            # After CLOSE_SECONDS this wait ends, although a worker may still be busy with an
            # earlier job, or wait for the answer to the last request.
            wait(futures, CLOSE_SECONDS)
        # Worker.close() waits for the job that its thread runs. All processes are killed before the
        # first wait, so that all jobs end at the same time.
        for worker in self.workers:
            worker.begin_closing()
        for worker in self.workers:
            worker.close()

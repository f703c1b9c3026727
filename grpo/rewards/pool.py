"""Worker processes for reward functions, with a time limit for every request."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from grpo.rewards.functions import FunctionInfo
from grpo.rewards.worker import GATHER_GRACE_SECONDS, Outcome
from grpo.system import first_line

LOAD_SECONDS = 120.0
"""Time limit for starting a worker and importing a reward, which may load a whole library."""
MAX_OUTPUT_BYTES = 32 * 1024
"""Bytes of a worker's output per step that are printed to our stderr. The rest is read and dropped."""
MAX_ANSWER_BYTES = 256 * 1024**2

# With -c, Python puts the working folder first in sys.path: until that is replaced, only built-in modules are imported.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from grpo.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)


class WorkerLost(Exception):
    """A worker was killed because it was late (``kind`` is ``"timeout"``), or it has ended (``"died"``)."""

    def __init__(self, kind: str, cause: str):
        super().__init__(cause)
        self.kind = kind


class WorkerProcess:
    """One process that runs ``grpo.rewards.worker`` in a folder. One thread at a time may send it requests."""

    def __init__(self, directory: str, worker: str):
        """``worker``: the class that answers requests, ``package.module:name``."""
        self.loaded: dict[int, FunctionInfo] = {}
        self.num_printed_bytes = 0
        self._is_late = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-u",
                "-c",
                _BOOTSTRAP,
                str(theirs.fileno()),
                str(os.getpid()),
                worker,
                *_worker_sys_path(directory),
            ]
            # A session of its own: a Ctrl-C in the terminal does not reach the worker, and killing its process group
            # also kills processes that a reward has started.
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        self._connection = Connection(os.dup(self._socket.fileno()))
        threading.Thread(target=self._forward_output, daemon=True, name="reward output").start()

    @property
    def has_ended(self) -> bool:
        # Not poll(): that would free the process id, by which end() kills the group.
        with contextlib.suppress(ChildProcessError):  # it has been waited for
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        return True

    def request(self, seconds: float, *request: Any) -> Any:
        """The answer to a request (see ``worker.main``). ``WorkerLost``: there is none, and the process has ended.

        A request may hold objects of the user's script, whose classes the worker cannot import.
        """
        pickled = cloudpickle.dumps(request)
        limit = threading.Timer(seconds, self._end_late)
        limit.daemon = True
        limit.start()
        try:
            self._connection.send_bytes(pickled)
            return pickle.loads(self._connection.recv_bytes(MAX_ANSWER_BYTES))
        except Exception as error:  # it has ended, or a reward has written something else to the connection
            code = self.end()
            if self._is_late:
                raise WorkerLost("timeout", f"did not answer within {seconds:g} s") from None
            death = f"exited with status {code}" if code >= 0 else f"ended by signal {-code}, {signal.strsignal(-code)}"
            raise WorkerLost("died", f"{death} ({error!r})") from None
        finally:
            limit.cancel()
            limit.join()  # a late kill must not hit the next request

    def end(self) -> int:
        """Kill the process and those that it has started. Returns its exit status: its own, if it ended before that."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # another thread has just done it
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # a process that has left the group may hold the other end
        return self._process.wait()

    def _end_late(self) -> None:
        self._is_late = not self.has_ended
        self.end()

    def _forward_output(self) -> None:
        with self._process.stdout as output:
            while chunk := os.read(output.fileno(), 65536):
                num_allowed = max(0, MAX_OUTPUT_BYTES - self.num_printed_bytes)
                text = chunk[:num_allowed].decode(errors="replace")
                if len(chunk) > num_allowed > 0:
                    text += f"\n[over {MAX_OUTPUT_BYTES} bytes were printed in one step; the rest is dropped]\n"
                self.num_printed_bytes += len(chunk)
                with contextlib.suppress(OSError, ValueError):  # our stderr may already be closed at exit
                    print(text, end="", file=sys.stderr, flush=True)


def _worker_sys_path(directory: str) -> list[str]:
    """Our ``sys.path`` with the working folder last: a ``json.py`` there does not replace the standard module.

    The folder of this package keeps its place.
    """
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = [entry or os.getcwd() for entry in sys.path]
    path = [entry for entry in path if entry == package_root or entry not in (directory, os.getcwd())]
    return path + [entry for entry in (package_root, directory) if entry not in path]


class WorkerPool:
    """Threads that each have a worker process, started when it is needed, and again after it has ended.

    The threads live as long as the workers: the kernel kills a worker when the thread that started it ends. The working
    folder is that of the start, so that relative paths stay valid.
    """

    def __init__(self, num_workers: int, worker: str = "grpo.rewards.worker:Worker"):
        self._num_workers, self._directory, self._worker = num_workers, os.getcwd(), worker
        self.functions: dict[int, tuple[Any, ...]] = {}
        """Objects that the workers load, by key: the arguments of ``load``."""
        self._processes: list[WorkerProcess] = []
        self._threads: ThreadPoolExecutor | None = None
        self._own = threading.local()

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job in a thread of the pool. Jobs may call :meth:`run` and :meth:`request`."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_workers, "rewards")
        return self._threads.submit(job, *arguments)

    def load_or_here(self, here: Any, notes: list[str], what: str, key: int, *function: Any) -> Any:
        """:meth:`load`, whose last argument is None or an object of the user's program, which a worker gets pickled.

        If no worker can load the object, ``here`` does, a worker in this process, and a line in ``notes`` says so.
        """
        *names, own = function
        if own is None:
            return self.load(key, *function)
        try:
            answer = self.load(key, *names, cloudpickle.dumps(own))
        except Exception as error:  # of any type: each object may raise its own
            answer = error
        if not isinstance(answer, Exception):
            return answer

        self.functions.pop(key, None)
        found = here.load(key, *function)
        if not isinstance(found, ValueError):
            reason = f"it cannot be sent to a worker process ({type(answer).__name__}: {first_line(answer)})"
            notes.append(f"note: {what} runs in this process, where a hang cannot end: {reason}")
        return found

    def load(self, key: int, *function: Any) -> Any:
        """``Worker.load``, which has the arguments, in one worker. The others load it when they need it."""
        self.functions[key] = function
        try:
            return self.submit(lambda: self._load(self._process(), key)).result()
        except WorkerLost as lost:
            return ValueError(f"reward {function[0]!r} cannot be loaded: its worker process {lost}")

    def run(self, calls: Sequence[tuple[int, bytes]], timeout_s: float) -> list[Outcome]:
        """``Worker.run`` in the worker of this thread; ``WorkerLost`` if it does not answer in time."""
        process = self._ready({key for key, _ in calls})
        is_async = any(process.loaded[key].is_async for key, _ in calls)
        seconds = timeout_s + (GATHER_GRACE_SECONDS if is_async else 0)
        return process.request(seconds, "run", calls, timeout_s)

    def request(self, keys: Collection[int], seconds: float, *request: Any) -> Any:
        """The answer of this thread's worker, which has loaded ``keys``; ``WorkerLost`` if there is none in time."""
        return self._ready(keys).request(seconds, *request)

    def _ready(self, keys: Collection[int]) -> WorkerProcess:
        process = self._process()
        for key in set(keys) - process.loaded.keys():
            if isinstance(mistake := self._load(process, key), ValueError):
                raise WorkerLost("died", f"was restarted and could not load the function again: {mistake}")
        return process

    def begin_step(self) -> None:
        """Print up to :data:`MAX_OUTPUT_BYTES` of each worker's output again."""
        for process in self._processes:
            process.num_printed_bytes = 0

    def close(self) -> None:
        """End the threads and the workers. A later job starts new ones."""
        for wait in (False, True):  # a thread may start a worker in the meantime
            if self._threads is not None:
                self._threads.shutdown(wait=wait, cancel_futures=True)
            for process in self._processes:
                process.end()
        self._threads, self._processes = None, []

    def _process(self) -> WorkerProcess:
        process = getattr(self._own, "process", None)
        if process is None or process.has_ended:
            if process in self._processes:
                process.end()
                self._processes.remove(process)
            process = self._own.process = WorkerProcess(self._directory, self._worker)
            self._processes.append(process)
        return process

    def _load(self, process: WorkerProcess, key: int) -> FunctionInfo | ValueError:
        found = process.request(LOAD_SECONDS, "load", key, *self.functions[key])
        if not isinstance(found, ValueError):
            process.loaded[key] = found
        return found

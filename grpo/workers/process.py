"""One worker process: started, asked with a time limit, and killed with all that it has started.

A call that hangs is ended here. :meth:`WorkerProcess.ask` starts a timer, sends the requests and
waits for the answers. The timer kills the process and its children. That ends the connection, and
so the wait, and each request gets an answer of the kind ``"timeout"``. The next request starts
another process (:class:`grpo.workers.pool.Worker`).
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import cloudpickle

from grpo.workers.host import HOST, Answer, Request, failure

MAX_OUTPUT_BYTES = 32 * 1024
"""Bytes of a worker's output per step that are printed to our stderr. The rest is read and
dropped."""
MAX_ANSWER_BYTES = 256 * 1024**2
GRACE_SECONDS = 1.0
"""Awaitables are cancelled at their limit. A process that has not answered this many seconds later
is killed."""

# With -c, Python puts the working folder first in sys.path. Until that is replaced, only built-in
# modules are imported.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[4:]; from grpo.workers.host import serve; serve(*map(int, sys.argv[1:4]))"
)


class WorkerProcess:
    """A process that runs :func:`grpo.workers.host.serve` in a folder.

    One thread at a time may ask it.
    """

    def __init__(self, directory: str, memory_bytes: int):
        self.loaded: set[Hashable] = {HOST}
        """The keys of the objects that it has loaded."""
        self.num_printed_bytes = 0
        self._is_late = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-u", "-c", _BOOTSTRAP]
            command += [str(theirs.fileno()), str(os.getpid()), str(memory_bytes)]
            command += _worker_sys_path(directory)
            # A session of its own: a Ctrl-C in the terminal does not reach the worker, and killing
            # its process group also kills the processes that an object has started.
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        # The socket is kept too: it can be shut down while a thread reads from the connection.
        self._connection = Connection(os.dup(self._socket.fileno()))
        threading.Thread(target=self._forward_output, daemon=True, name="worker output").start()

    @property
    def has_ended(self) -> bool:
        # Not poll(): that would free the process id, by which end() kills the group.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # it has been waited for
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        return True

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Return the answers of the process's :class:`grpo.workers.host.Host`.

        If there is no answer within the limit and some grace, the process is killed, and each
        request gets that as its answer.
        """
        started = time.perf_counter()
        # By cloudpickle: the worker cannot import the classes of the user's script.
        try:
            pickled = cloudpickle.dumps((requests, limit_s))
        except Exception as error:  # of any type: each object may raise its own
            return [failure(error)] * len(requests)
        # A timer in a thread of its own, since a process may stop in the middle of an answer, or
        # never read the message: this thread waits in both cases.
        limit = threading.Timer(limit_s + GRACE_SECONDS, self._end_late)
        limit.daemon = True
        limit.start()
        try:
            self._connection.send_bytes(pickled)
            return pickle.loads(self._connection.recv_bytes(MAX_ANSWER_BYTES))
        except Exception as error:
            # The process has ended, or an object has written something else to the connection.
            answer = self._lost(limit_s, error)
            return [replace(answer, seconds=time.perf_counter() - started)] * len(requests)
        except BaseException:
            # After a Ctrl-C in this thread, the answer would be taken for that of the next request.
            self.end()
            raise
        finally:
            limit.cancel()
            # A late kill must not hit the next message.
            limit.join()

    def _lost(self, limit_s: float, error: Exception) -> Answer:
        """Kill the process, and say how it ended."""
        code = self.end()
        if self._is_late:
            kind = "timeout"
            cause = f"did not answer within {limit_s:g} s"
        else:
            kind = "died"
            end = f"exited with status {code}"
            if code < 0:
                end = f"ended by signal {-code}, {signal.strsignal(-code)}"
            cause = f"{end} ({error!r})"
        return Answer(kind, message=f"its worker process {cause}", is_worker_lost=True)

    def end(self) -> int:
        """Kill the process and those that it has started.

        Returns its exit status, which is its own if it ended before that.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # another thread has just done it
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that has left the group may hold the other end, and keep the reader waiting.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
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
                    excess = f"over {MAX_OUTPUT_BYTES} bytes were printed in one step"
                    text += f"\n[{excess}; the rest is dropped]\n"
                self.num_printed_bytes += len(chunk)
                # Our stderr may already be closed at exit.
                with contextlib.suppress(OSError, ValueError):
                    print(text, end="", file=sys.stderr, flush=True)


def _worker_sys_path(directory: str) -> list[str]:
    """Our ``sys.path`` with the working folder last, where a ``json.py`` replaces no standard module.

    The folder of this package keeps its place.
    """
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = []
    for entry in sys.path:
        folder = entry or os.getcwd()
        if folder == package_root or folder not in (directory, os.getcwd()):
            path.append(folder)
    return path + [folder for folder in (package_root, directory) if folder not in path]

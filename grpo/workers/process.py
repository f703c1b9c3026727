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
from collections.abc import Hashable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle

from grpo.workers.host import HOST, Answer, Request, failure

MAX_ANSWER_BYTES = 256 * 1024**2
STDERR = 2
"""The file descriptor of our stderr, to which workers print."""
GRACE_SECONDS = 1.0
"""Awaitables are cancelled at their limit. A process that has not answered this many seconds later
is killed."""

# With -c, Python puts the working folder first in sys.path. Until that is replaced, only built-in
# modules are imported.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[3:]; from grpo.workers.host import serve; serve(*map(int, sys.argv[1:3]))"


class WorkerProcess:
    """A process that runs :func:`grpo.workers.host.serve` in a folder.

    One thread at a time may ask it.
    """

    def __init__(self, directory: str):
        self.loaded: set[Hashable] = {HOST}
        """The keys of the objects that it has loaded."""
        self._is_late = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-u", "-c", _BOOTSTRAP]
            command += [str(theirs.fileno()), str(os.getpid())]
            # The folder of this package may be on no path but that of an editable installation.
            package_root = str(Path(__file__).parents[2])
            # The working folder is last: a json.py there replaces no standard module.
            path = [folder for folder in sys.path if folder not in ("", directory)]
            command += [*path, package_root, directory]
            # A session of its own: a Ctrl-C in the terminal does not reach the worker, and killing
            # its process group also kills the processes that an object has started.
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                stderr=STDERR,
            )
        # The socket is kept too: it can be shut down while a thread reads from the connection.
        self._connection = Connection(os.dup(self._socket.fileno()))

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
            return [self._lost(limit_s, error)] * len(requests)
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
            cause = f"ended by signal {-code}" if code < 0 else f"exited with status {code}"
            cause += f" ({error!r})"
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

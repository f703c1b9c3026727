"""The trainer's side of one worker process: start it, ask it with a time limit, kill it.

A call that hangs is ended here. :meth:`WorkerProcess.ask` starts a timer, sends the requests and
waits for the answers. At the time limit the timer kills the process and its children. That closes
the connection and so ends the wait, and each request gets an answer of the kind ``"timeout"``.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle

from grpo.workers.host import error_answer
from grpo.workers.protocol import Answer, Request

MAX_ANSWER_BYTES = 256 * 1024**2
"""Largest pickled list of answers. One that is larger counts as the death of the worker."""
STDERR = 2
"""File descriptor of the trainer's stderr, to which workers print everything."""
GRACE_SECONDS = 1.0
"""Time between the limit, at which the worker cancels awaitables, and the kill of its process."""

# With -c, Python puts the working folder first in sys.path. Until that is replaced, only built-in
# modules are imported.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from grpo.workers.host import serve; serve(*map(int, sys.argv[1:3]))"
)


class WorkerProcess:
    """A process that runs :func:`grpo.workers.host.serve`. One thread at a time may ask it.

    Args:
        directory: its working folder.
    """

    def __init__(self, directory: str):
        self._has_timed_out = False
        self._socket, worker_socket = socket.socketpair()
        with worker_socket:
            command = [sys.executable, "-u", "-c", _BOOTSTRAP]
            command += [str(worker_socket.fileno()), str(os.getpid())]
            # sys.path may lack the folder of this package, if an editable installation has found it
            # in another way.
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
                pass_fds=[worker_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                stderr=STDERR,
            )
        # The connection has a copy of the descriptor. The socket stays open beside it, since only a
        # socket can be shut down by kill() while ask() reads in another thread.
        self._connection = Connection(os.dup(self._socket.fileno()))

    @property
    def has_ended(self) -> bool:
        """True if the process has exited or was killed."""
        # Not poll(): it would free the process id, which kill() still needs for the group.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # kill() has freed the process id
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        return True

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Return the answers of the process's :meth:`grpo.workers.host.Host.ask`.

        If no answer comes within the limit and :data:`GRACE_SECONDS`, or if the process ends, each
        request gets the same answer, with the cause.
        """
        # By cloudpickle: the worker cannot import the classes of the user's script.
        try:
            pickled = cloudpickle.dumps((requests, limit_s))
        except Exception as error:  # of any type: each object may raise its own
            return [error_answer(error)] * len(requests)

        # A timer in its own thread bounds the sending, too: this thread waits for ever if the
        # process never reads the message, or stops in the middle of an answer.
        timer = threading.Timer(limit_s + GRACE_SECONDS, self._time_out)
        timer.daemon = True
        timer.start()
        try:
            self._connection.send_bytes(pickled)
            return pickle.loads(self._connection.recv_bytes(MAX_ANSWER_BYTES))
        except Exception as error:
            # The process has ended, or an object has written something else to the connection.
            return [self._kill_and_explain(limit_s, error)] * len(requests)
        except BaseException:
            # After a Ctrl-C in this thread, the answer still comes. It would be taken for that of
            # the next request.
            self.kill()
            raise
        finally:
            timer.cancel()
            # A timer that has already begun cannot be cancelled. Its kill must not hit the next
            # request.
            timer.join()

    def kill(self) -> int:
        """Kill the process and those that it has started.

        Returns its exit status: the process's own if it had exited, else minus the signal.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # another thread has just done it
                os.killpg(self._process.pid, signal.SIGKILL)
            # A child that has left the group may still hold the worker's end, so that the read in
            # ask() would wait for ever.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return self._process.wait()

    def _time_out(self) -> None:
        # A process that has ended by itself was not late.
        self._has_timed_out = not self.has_ended
        self.kill()

    def _kill_and_explain(self, limit_s: float, error: Exception) -> Answer:
        """Kill the process. Returns an answer that says how it ended."""
        status = self.kill()
        if self._has_timed_out:
            kind = "timeout"
            cause = f"did not answer within {limit_s:g} s"
        else:
            kind = "died"
            cause = f"ended by signal {-status}" if status < 0 else f"exited with status {status}"
            cause += f" ({error!r})"
        return Answer(kind, message=f"its worker process {cause}", is_worker_lost=True)

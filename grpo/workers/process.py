"""The trainer's side of one worker process: start it, ask it with a time limit, kill it.

A call that hangs is ended here. :meth:`WorkerProcess.ask` starts a timer, sends the requests and
waits for the answers. :data:`GRACE_SECONDS` after the time limit the timer kills the process group.
That closes the connection and so ends the wait, and each request gets an answer with the status
``"timeout"``.
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

MAX_ANSWER_BYTES = 1 << 28
"""Largest pickled list of answers: 256 MiB. The process that sends a larger one is killed."""
STDERR = 2
"""File descriptor of the trainer's stderr, to which workers print everything. The trainer's stdout
may be a pipe, through which another program reads the results of a command: what an object prints
must not get among them."""
GRACE_SECONDS = 1.0
"""Time from the limit until the kill, in which a worker can cancel awaitables and answer."""

# Program of a worker process, run by `python -c`. sys.argv[1] is the file descriptor of the
# connection, sys.argv[2] the process id of the trainer, and the rest the folders for sys.path.
# With -c, Python puts the working folder first in sys.path, where a file of the user may have the
# name of a module. So nothing but sys, which is built in, is imported before sys.path is replaced.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from grpo.workers.host import serve; serve(*map(int, sys.argv[1:3]))"
)


class WorkerProcess:
    """A process that runs :func:`grpo.workers.host.serve`.

    Only the thread of its :class:`grpo.workers.pool.Worker` asks it. Any thread may kill it.

    Args:
        directory: working folder of the process.
    """

    def __init__(self, directory: str):
        self._has_timed_out = False
        self._socket, worker_socket = socket.socketpair()
        with worker_socket:
            # The working folder is last: a file json.py there must not replace the standard module.
            path = [folder for folder in sys.path if folder not in ("", directory)]
            command = [
                sys.executable,
                "-u",
                "-c",
                _BOOTSTRAP,
                str(worker_socket.fileno()),
                str(os.getpid()),
                *path,
                # sys.path may lack the folder that contains the package grpo: an editable
                # installation may let Python import it by a hook.
                str(Path(__file__).parents[2]),
                directory,
            ]
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
        try:
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        except ChildProcessError:
            # kill() has waited for the process already, which freed its id.
            return True

    def ask(self, requests: Sequence[Request], limit_s: float) -> list[Answer]:
        """Return the answers of the process's :meth:`grpo.workers.host.Host.ask`.

        The process is killed if it has not sent all answers :data:`GRACE_SECONDS` after the limit,
        or sends an answer that is too large or cannot be unpickled. Then, or if the process ends by
        itself, each request gets the same answer, with the cause in its message. If the answer was
        too large or unreadable, the message shows signal 9 (our own kill) and the read error.

        An argument that cannot be pickled makes all these requests fail, since they are one
        message.
        """
        # cloudpickle, since arguments may be of classes that the user's script defines, and the
        # worker cannot import the script: cloudpickle sends the definition of such a class. Answers
        # need only pickle: almost all hold built-in types and classes of grpo. serve() answers with
        # an error if one cannot be pickled.
        try:
            pickled = cloudpickle.dumps((requests, limit_s))
        except Exception as error:
            # The argument's class decides how it is pickled, so it may raise any exception.
            return [error_answer(error)] * len(requests)

        # Connection.poll() would bound only the wait for the first byte of the answers. The timer
        # bounds all: the process may also never read the message, or stop in the middle of its
        # answer.
        timer = threading.Timer(limit_s + GRACE_SECONDS, self._time_out)
        timer.daemon = True
        timer.start()
        try:
            self._connection.send_bytes(pickled)
            # Answers that arrive as the timer fires are returned, although the process is killed.
            # This is accepted: the answers are right, and the next request finds that the process
            # has ended and starts another.
            return pickle.loads(self._connection.recv_bytes(MAX_ANSWER_BYTES))
        except Exception as error:
            # The process has ended, or its answer is too large, or an object has written to the
            # descriptor of the connection, so that what was read is no answer.
            return [self._kill_and_explain(limit_s, error)] * len(requests)
        finally:
            timer.cancel()
            # cancel() does not stop a timer that has run out and is about to kill. This waits for
            # it, so that it does not kill the process in the middle of the next request.
            timer.join()

    def kill(self) -> int:
        """Kill the process and its process group.

        Returns the exit status of the process. It is -9 if this call has killed it.
        """
        if self._process.returncode is None:
            # Another thread may just have killed the process and waited for it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A child that has left the group may still hold the worker's end of the connection, so
            # that the read in ask() would wait for ever.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return self._process.wait()

    def _time_out(self) -> None:
        # If the process had ended by itself before, the answer says so, not "timeout".
        self._has_timed_out = not self.has_ended
        self.kill()

    def _kill_and_explain(self, limit_s: float, error: Exception) -> Answer:
        """Kill the process. Return an answer that says how it ended."""
        exit_status = self.kill()
        if self._has_timed_out:
            status = "timeout"
            cause = f"did not answer within {limit_s:g} s"
        else:
            status = "died"
            # After a signal, the exit status is minus the signal's number.
            if exit_status < 0:
                end = f"ended by signal {-exit_status}"
            else:
                end = f"exited with status {exit_status}"
            cause = f"{end} ({error!r})"
        return Answer(status, message=f"its worker process {cause}", is_worker_lost=True)

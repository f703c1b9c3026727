"""Start a worker process, send it requests with a time limit, and kill it when a limit passes."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from grpo.rewards.worker import HEADER

LOAD_SECONDS = 120.0
"""Time limit for starting a worker and importing a reward, longer than that of a call: an import may load a whole library."""
MAX_OUTPUT_BYTES = 32 * 1024
"""Bytes of a worker's output per step that are printed to our stderr. The rest is read and dropped."""
MAX_ANSWER_BYTES = 256 * 1024**2

_POLL_SECONDS = 0.05
# Until sys.path is set, the working folder comes first in it: nothing but sys, which is no file, may be imported.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from grpo.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


def _worker_sys_path(directory: str) -> list[str]:
    """Our ``sys.path``, then the working folder: a ``json.py`` there does not replace the module of the standard library."""
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = [entry or os.getcwd() for entry in sys.path]
    path = [entry for entry in path if entry == package_root or entry not in (directory, os.getcwd())]
    return path + [entry for entry in (package_root, directory) if entry not in path]


class WorkerProcess:
    """One worker process, started when it is needed and restarted after it has ended. Only one thread at a time may call it.

    ``functions`` are ``(spec, args, value)`` by key, with what ``objects.pickled`` returned as ``value``; a new process loads a function at
    its first call. The working folder ``directory`` is fixed when the run starts, so that relative paths stay valid after a restart.
    """

    def __init__(self, functions: list[tuple[str, dict[str, Any], bytes | str | None]], directory: str):
        self.functions, self.directory = functions, directory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._loaded: set[int] = set()
        self._num_jobs = self._num_printed_bytes = 0

    def load(self, key: int) -> tuple[str, Any]:
        """Load function ``key``: the worker's answer, ``("not sent", reason)``, ``("timeout", None)`` or ``("died", cause)``."""
        spec, args, value = self.functions[key]
        if isinstance(value, str):
            return "not sent", value
        answer = self._request(("load", key, spec, args, value), LOAD_SECONDS)
        if answer[0] == "ok":
            self._loaded.add(key)
        return answer

    def call(self, keys: list[int], request: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
        """Send a request that uses the functions ``keys`` and return its answer, ``("timeout", None)`` or ``("died", cause)``.

        After a timeout or a death the process has ended; the next call starts a new one.
        """
        if self._process is not None and self._process.poll() is not None:
            self.kill()  # the process ended after its last answer, which is not the fault of this call
        for key in keys:
            if key not in self._loaded:
                kind, value = self.load(key)
                if kind != "ok":
                    return "died", f"was restarted and could not load the function again: {value or 'timed out'}"
        return self._request(request, seconds)

    def _request(self, request: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
        if self._process is None:
            self._start()
        try:
            message = pickle.dumps(request)
        except Exception as error:  # values of the user's data may be of any class
            raise ValueError(f"a column cannot be sent to the worker process of the rewards: {error}") from error
        deadline = time.monotonic() + seconds
        self._num_jobs += 1
        try:
            self._connection.settimeout(seconds)
            self._connection.sendall(HEADER.pack(self._num_jobs, len(message)) + message)
            job, length = HEADER.unpack(self._receive(HEADER.size, deadline))
            if job != self._num_jobs:
                cause = "a reward wrote to the worker's connection, a file descriptor that is not its own"
            elif length > MAX_ANSWER_BYTES:
                cause = f"its answer has {length} bytes, and the limit is {MAX_ANSWER_BYTES}"
            else:
                answer = self._receive(length, deadline)
                try:
                    return pickle.loads(answer)
                except Exception as error:  # a reward may have written to the connection
                    cause = f"its answer cannot be read: {type(error).__name__}: {error}"
        except TimeoutError:
            self.kill()
            return "timeout", None
        except (EOFError, ConnectionError):
            return self._cause_of_death()
        self.kill()
        return "died", f"was killed: {cause}"

    def _receive(self, num_bytes: int, deadline: float) -> bytes:
        """Exactly ``num_bytes`` from the worker. Raises ``TimeoutError`` at the deadline, ``EOFError`` if the worker has ended."""
        received = bytearray()
        while len(received) < num_bytes:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ended = self._process.poll() is not None
            self._connection.settimeout(min(remaining, 0.001 if ended else _POLL_SECONDS))
            try:
                chunk = self._connection.recv(min(num_bytes - len(received), 1 << 20))
            except TimeoutError:
                # A child of the worker may keep the connection open, so the end of the worker does not always end the connection.
                if ended:
                    raise EOFError from None
                continue
            if not chunk:
                raise EOFError
            received += chunk
        return bytes(received)

    def _cause_of_death(self) -> tuple[str, Any]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        self.kill()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                cause = f"was killed by {signal.Signals(-code).name}"
                return "died", cause + (" (out of memory?)" if -code == signal.SIGKILL else "")
        return "died", f"exited with status {code}"

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), *_worker_sys_path(self.directory)]
            streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            # A session of its own: a Ctrl-C in the terminal does not reach the worker, and killing its process group also kills
            # processes that a reward has started.
            options = dict(pass_fds=[theirs.fileno()], cwd=self.directory, start_new_session=True)
            self._process = subprocess.Popen([sys.executable, "-c", _BOOTSTRAP, *arguments], **streams, **options)
        self._connection, self._loaded = ours, set()
        output = self._process.stdout
        threading.Thread(target=self._forward_output, args=(output,), daemon=True, name="reward-output").start()

    def _forward_output(self, output: Any) -> None:
        with output:
            while chunk := os.read(output.fileno(), 65536):
                num_allowed = MAX_OUTPUT_BYTES - self._num_printed_bytes
                self._num_printed_bytes += len(chunk)
                if num_allowed <= 0:
                    continue
                text = chunk[:num_allowed].decode(errors="replace")
                if len(chunk) > num_allowed:
                    limit = f"{MAX_OUTPUT_BYTES} bytes in one step"
                    text += f"\n[a reward printed more than {limit}; the rest is dropped]\n"
                with contextlib.suppress(OSError, ValueError):  # our stderr may already be closed at exit
                    sys.stderr.write(text)
                    sys.stderr.flush()

    def begin_step(self) -> None:
        """Print up to :data:`MAX_OUTPUT_BYTES` of output again."""
        self._num_printed_bytes = 0

    def kill(self) -> None:
        """Kill the process and its process group. Does nothing if no process runs."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._process, self._connection, self._loaded = None, None, set()

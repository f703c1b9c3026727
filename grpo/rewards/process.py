"""Start a worker process, send it requests with a time limit, and kill it when a limit passes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Pipe
from multiprocessing.reduction import ForkingPickler
from typing import Any

LOAD_SECONDS = 120.0
"""Time limit for starting a worker and importing a reward, longer than that of a call: an import may load a whole library."""
MAX_OUTPUT_BYTES = 32 * 1024
"""Bytes of a worker's output per step that are printed to our stderr. The rest is read and dropped."""

_POLL_SECONDS = 0.05
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from grpo.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


def _worker_sys_path() -> list[str]:
    """Our ``sys.path``, with '' replaced by the working folder, and the folders that the worker needs added."""
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = [entry or os.getcwd() for entry in sys.path]
    return path + [entry for entry in (os.getcwd(), package_root) if entry not in path]


class WorkerProcess:
    """One worker process, started when it is needed and restarted after it has ended. Only one thread at a time may call it.

    ``functions`` are ``(spec, args)`` by key; a new process loads a function at its first call. The working folder ``directory`` is fixed
    when the run starts, so that relative paths stay valid after a restart.
    """

    def __init__(self, functions: list[tuple[str, dict[str, Any]]], directory: str):
        self.functions, self.directory = functions, directory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._loaded: set[int] = set()
        self._num_printed_bytes = 0

    def load(self, key: int) -> tuple[str, Any]:
        """Load function ``key``: ``("ok", FunctionInfo)``, ``("invalid", message)``, ``("timeout", None)`` or ``("died", cause)``."""
        spec, args = self.functions[key]
        answer = self._request(("load", key, spec, args), LOAD_SECONDS)
        if answer[0] == "ok":
            self._loaded.add(key)
        return answer

    def call(self, keys: list[int], request: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
        """Send a request that uses the functions ``keys`` and return its answer, ``("timeout", None)`` or ``("died", cause)``.

        After a timeout or a death the process has ended; the next call starts a new one.
        """
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
            message = ForkingPickler.dumps(request)
        except Exception as error:
            raise ValueError(f"a column cannot be sent to the worker process of the rewards: {error}") from error
        deadline = time.monotonic() + seconds
        try:
            self._connection.send_bytes(message)
            while True:
                remaining = deadline - time.monotonic()
                if self._connection.poll(max(0.0, min(_POLL_SECONDS, remaining))):
                    return self._connection.recv()
                # A child of the worker may keep the connection open, so the end of the worker does not always end the connection.
                if self._process.poll() is not None and not self._connection.poll(0):
                    return self._cause_of_death()
                if remaining <= 0:
                    self.kill()
                    return "timeout", None
        except (EOFError, ConnectionError):
            return self._cause_of_death()

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
        ours, theirs = Pipe(duplex=True)
        with theirs:
            arguments = [json.dumps(_worker_sys_path()), str(theirs.fileno()), str(os.getpid())]
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

"""The parent's side of one worker process: start it, give it a job with a time limit, kill it when the limit passes."""

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
"""For starting a worker and importing a reward; apart from the time limit of a call, as an import may pull in a whole library."""
OUTPUT_BYTES = 32 * 1024
"""What a worker may print to our stderr in one step; the rest is read and dropped."""

_POLL_SECONDS = 0.05
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from grpo.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


def _python_path() -> list[str]:
    """Our ``sys.path``, so that the worker imports what we would; '' made explicit, and never without this package."""
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = [entry or os.getcwd() for entry in sys.path]
    return path + [entry for entry in (os.getcwd(), package_root) if entry not in path]


class WorkerProcess:
    """One restartable worker. Calls are made by one thread at a time.

    Args:
        functions: ``(spec, args)`` by key; a fresh process loads a function when it is first called.
        directory: the working folder, fixed when the run starts so that a restart finds the same relative paths.
    """

    def __init__(self, functions: list[tuple[str, dict[str, Any]]], directory: str):
        self.functions = functions
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._loaded: set[int] = set()
        self._printed = 0

    def load(self, key: int) -> tuple[str, Any]:
        """Load function ``key``; ``("ok", FunctionInfo)``, ``("invalid", line)``, ``("timeout", None)`` or ``("died", how)``."""
        spec, args = self.functions[key]
        answer = self._ask(("load", key, spec, args), LOAD_SECONDS)
        if answer[0] == "ok":
            self._loaded.add(key)
        return answer

    def call(self, keys: list[int], job: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
        """Run a job that uses the functions ``keys``: its answer, or ``("timeout", None)`` / ``("died", how)``.

        After these two the process is gone; the next call starts another.
        """
        for key in keys:
            if key not in self._loaded:
                kind, value = self.load(key)
                if kind != "ok":
                    return "died", f"the worker was restarted and could not load it again: {value or 'timed out'}"
        return self._ask(job, seconds)

    def _ask(self, job: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
        if self._process is None:
            self._start()
        try:
            message = ForkingPickler.dumps(job)
        except Exception as error:
            raise ValueError(f"a column cannot be handed to the rewards' worker process: {error}") from error
        deadline = time.monotonic() + seconds
        try:
            self._connection.send_bytes(message)
            while True:
                remaining = deadline - time.monotonic()
                if self._connection.poll(max(0.0, min(_POLL_SECONDS, remaining))):
                    return self._connection.recv()
                # A process that the reward forked may hold the connection open, so its end alone is no sign of death.
                if self._process.poll() is not None and not self._connection.poll(0):
                    return self._died()
                if remaining <= 0:
                    self.kill()
                    return "timeout", None
        except (EOFError, ConnectionError):
            return self._died()

    def _died(self) -> tuple[str, Any]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        self.kill()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(-code).name}"
                return "died", how + (" (out of memory?)" if -code == signal.SIGKILL else "")
        return "died", f"exited with status {code}"

    def _start(self) -> None:
        ours, theirs = Pipe(duplex=True)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(_python_path()), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                # Its own session: a Ctrl-C in the terminal is ours to handle, and killing the group takes along whatever
                # processes a reward has started.
                start_new_session=True,
            )
        self._connection = ours
        self._loaded = set()
        threading.Thread(target=self._forward, args=(self._process.stdout,), daemon=True, name="reward-output").start()

    def _forward(self, output: Any) -> None:
        with output:
            while chunk := os.read(output.fileno(), 65536):
                room = OUTPUT_BYTES - self._printed
                self._printed += len(chunk)
                if room <= 0:
                    continue
                text = chunk[:room].decode(errors="replace")
                if len(chunk) > room:
                    text += f"\n[a reward printed more than {OUTPUT_BYTES} bytes in one step; the rest is dropped]\n"
                with contextlib.suppress(OSError, ValueError):  # our own stderr may be closed at exit
                    sys.stderr.write(text)
                    sys.stderr.flush()

    def new_step(self) -> None:
        """Allow the next :data:`OUTPUT_BYTES` of output."""
        self._printed = 0

    def kill(self) -> None:
        """End the process and its group, now; harmless when there is none."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._process = self._connection = None
        self._loaded = set()

"""vLLM servers that the trainer starts on its own machine (``rollout.server=start``), and that end with it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from grpo.config import ConfigError
from grpo.system.environment_defaults import without_environment_defaults

TERM_SECONDS = 10.0
"""Seconds that the processes of a server have to end."""
LAUNCHER_VARIABLES = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_.*|MASTER_ADDR|MASTER_PORT"
    "|TORCHELASTIC_.*|TORCH_NCCL_.*"
)
"""Environment variables of the trainer's launcher, which would make the server look for other ranks."""
END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""A program that becomes the server's, which gets SIGTERM when its parent has ended (PR_SET_PDEATHSIG), also by
SIGKILL.
"""
ERROR_LINE = re.compile(r"(\b\w*(Error|Exception)|\berror): ")
WITHOUT_CAUSE = ("Engine core initialization failed", "Engine process failed to start", "EngineCore encountered")
"""Errors of vLLM's front end that only say that there was an error before."""


class StartedServer:
    """A server and its processes, in a process group of their own: Ctrl-C in the terminal is for the trainer."""

    def __init__(self, command: str, model: str, index: int, options: dict[str, str | None], log: Path):
        """Start it; ConfigError if the program is not found.

        Args:
            command: ``rollout.vllm_command``, which is cut into words without a shell.
            model: the model's folder.
            index: its number among the servers.
            options: of vLLM by name, for what the command leaves out; None: without a value.
            log: gets its output.
        """
        words = [w.replace("{model}", model).replace("{index}", str(index)) for w in shlex.split(command)]
        environment = _environment()
        if shutil.which(words[0], path=environment.get("PATH")) is None:
            install = "install vLLM (it may be in an environment of its own) and name its program"
            raise ConfigError(
                f"rollout.vllm_command: {words[0]} is not found: {install}: /path/bin/vllm serve {{model}}"
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options = {"--host": "127.0.0.1", "--port": str(free.getsockname()[1])} | options
        given = {}  # also of --max_model_len=N
        for word, following in zip(words, [*words[1:], ""], strict=True):
            option, equals, value = word.partition("=")
            given[option.replace("_", "-")] = value if equals else following
        for name, value in options.items():
            if name not in given:
                words += [name] if value is None else [name, value]
        host, port = ((options | given)[name] for name in ("--host", "--port"))
        self.address, self.log = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}", log
        with open(log, "ab") as file:
            self._log_start = file.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-Ic", END_WITH_PARENT, str(os.getpid()), *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> None:
        """Return when it answers; ConfigError if it ends, or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # requests to this machine need no proxy
        while True:
            if self.process.poll() is not None:
                raise ConfigError(f"vLLM {self.explain('')}")
            with contextlib.suppress(OSError):
                direct.open(f"{self.address}/health", timeout=5).close()
                return
            if time.monotonic() > deadline:
                limit = f"{timeout_s:g} s (rollout.server_timeout_s)"
                raise ConfigError(f"vLLM at {self.address} does not answer after {limit}: see {self.log}")
            time.sleep(0.2)

    def explain(self, problem: str) -> str:
        """How it has ended, with the last error of its log; while it runs the problem as it is, with the log."""
        if (code := self.process.poll()) is not None:
            problem = f"has ended (exit code {code}): {self._last_error()}"
        return f"{problem} (log: {self.log})"

    def close(self) -> None:
        """End its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TERM_SECONDS)

    def _last_error(self) -> str:
        """The last line of its log that names an error and its cause; else the last line."""
        with open(self.log, "rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - 2**20))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if ERROR_LINE.search(line) and not any(w in line for w in WITHOUT_CAUSE)]
        last = (errors or lines or ["no output"])[-1]
        # Without vLLM's prefix of process, date and source file.
        return re.sub(r"^(\(\w+ pid=\d+\) )?((ERROR|INFO|WARNING) [\d-]+ [\d:]+ \[[^\]]*\] )?", "", last)


def _environment() -> dict[str, str]:
    """The trainer's environment without what its launcher and this package set, and with the routes that load
    weights.
    """
    found = without_environment_defaults(os.environ)
    # torchrun sets 1 for its processes unless the user has set a number.
    if "TORCHELASTIC_RUN_ID" in found and found.get("OMP_NUM_THREADS") == "1":
        del found["OMP_NUM_THREADS"]
    found = {name: value for name, value in found.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
    return found | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}

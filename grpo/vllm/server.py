"""vLLM servers that the trainer starts on its own machine (``rollout.server=start``), and that end with it."""

from __future__ import annotations

import argparse
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
from pathlib import Path

import httpx
import huggingface_hub

from grpo.config import Config, ConfigError
from grpo.distributed import World
from grpo.model import Policy, base_of
from grpo.system import without_environment_defaults
from grpo.vllm.check import DTYPE_NAMES, RUNTIME_LORA, max_lora_rank
from grpo.vllm.weights import MOST

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
"""Becomes the server's program, which gets SIGTERM when its parent has ended (PR_SET_PDEATHSIG), also by SIGKILL."""
ERROR_LINE = re.compile(r"(\b\w*(Error|Exception)|\berror): ")
WITHOUT_CAUSE = ("Engine core initialization failed", "Engine process failed to start", "EngineCore encountered")
"""Errors of vLLM's front end that only say that there was an error before."""


def start_servers(
    config: Config, world: World, policy: Policy, path: str, longest: int, folder: Path, stack: contextlib.ExitStack
) -> list[StartedServer]:
    """Servers on this machine, when all answer; ``stack`` ends them. Arguments as of :func:`grpo.vllm.build_engine`."""
    settings, path, rank = config.rollout, base_of(path), max_lora_rank(policy)
    if world.num_machines > 1:
        raise ConfigError("rollout.server=start is for one machine: name the addresses of servers in rollout.server")
    options = ["--dtype", DTYPE_NAMES[policy.precision], "--logprobs-mode", "processed_logprobs"]
    options += ["--enable-scale-out", "--disable-uvicorn-access-log"]
    if longest:
        options += ["--max-model-len", str(max(longest, MOST + 1))]
    if policy.device.type == "cpu":
        options += ["--no-enable-chunked-prefill"]
    if rank is not None:
        options += ["--enable-lora", "--max-lora-rank", str(rank)]
    is_local, started = os.path.isdir(path), []
    model = os.path.abspath(path) if is_local else huggingface_hub.snapshot_download(path, local_files_only=True)
    for index in range(settings.num_servers):
        log = folder / f"vllm-{index}.log"
        started.append(StartedServer(settings.vllm_command, model, index, options, log))
        stack.callback(started[-1].close)
    print(f"starting vLLM (log: {', '.join(str(server.log) for server in started)}) ...", flush=True)
    for server in started:
        server.wait(config.runtime.timeout_s / 3)
    return started


class StartedServer:
    """A server and its processes, in a process group of their own: Ctrl-C in the terminal is for the trainer."""

    def __init__(self, command: str, model: str, index: int, options: list[str], log: Path):
        """Start server number ``index`` for the folder ``model``; ConfigError if the program is not found.

        Options of ``command`` (``rollout.vllm_command``) behind the model win over ``options``. Output goes to ``log``.
        """
        words = shlex.split(command)
        behind_model = max(number for number, word in enumerate(words, 1) if "{model}" in word)
        words = [w.replace("{model}", model).replace("{index}", str(index)) for w in words]
        environment = _environment()
        if shutil.which(words[0], path=environment.get("PATH")) is None:
            remedy = "install vLLM and name its program: /path/bin/vllm serve {model}"
            raise ConfigError(f"rollout.vllm_command: {words[0]} is not found: {remedy}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", default=str(port))
        place, _ = parser.parse_known_args([word for word in words if word != "--"])
        # Before the command's own options: of two values, the last one counts.
        words[behind_model:behind_model] = [*options, "--host", place.host, "--port", place.port]
        self.address, self.log = f"http://{'127.0.0.1' if place.host == '0.0.0.0' else place.host}:{place.port}", log
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
        while True:
            if self.process.poll() is not None:
                raise ConfigError(f"vLLM {self.explain('')}")
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.address}/health", timeout=5, trust_env=False).raise_for_status()
                return
            if time.monotonic() > deadline:
                after = f"{timeout_s:g} s (a third of runtime.timeout_s)"
                raise ConfigError(f"vLLM at {self.address} does not answer after {after}: see {self.log}")
            time.sleep(0.2)

    def explain(self, problem: str) -> str:
        """Its exit code and the last error in its log; while it runs, ``problem``. Both with the log's path."""
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
        text = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if ERROR_LINE.search(line) and not any(w in line for w in WITHOUT_CAUSE)]
        last = (errors or lines or ["no output"])[-1]
        # Without vLLM's prefix of process, date and source file.
        return re.sub(r"^(\(\w+ pid=\d+\) )?((ERROR|INFO|WARNING) [\d-]+ [\d:]+ \[[^\]]*\] )?", "", last)


def _environment() -> dict[str, str]:
    """The trainer's environment without what launcher and package set, and with the routes that load weights."""
    found = without_environment_defaults(os.environ)
    # torchrun sets 1 for its processes unless the user has set a number.
    if "TORCHELASTIC_RUN_ID" in found and found.get("OMP_NUM_THREADS") == "1":
        del found["OMP_NUM_THREADS"]
    found = {name: value for name, value in found.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
    return found | {"VLLM_SERVER_DEV_MODE": "1", RUNTIME_LORA: "True"}

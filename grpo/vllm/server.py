"""vLLM servers that the trainer starts on its own machine (``rollout.server=start``), and that end
with it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
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
from grpo.vllm.weights import DTYPES, MOST

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for ``--max-lora-rank``."""
LAUNCHER_VARIABLES = re.compile(
    "RANK|WORLD_SIZE|(LOCAL|GROUP)_(RANK|WORLD_SIZE)|ROLE_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_.*"
)
"""Environment variables of the trainer's launcher, which would make the server look for other
ranks."""
END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Becomes the server's program, which gets SIGTERM when its parent has ended (PR_SET_PDEATHSIG),
also by SIGKILL."""


def start_server(
    config: Config,
    world: World,
    policy: Policy,
    path: str,
    longest: int,
    folder: Path,
    stack: contextlib.ExitStack,
) -> StartedServer:
    """A server on this machine, when it answers; ``stack`` ends it. Arguments as of
    :func:`grpo.vllm.build_engine`."""
    if world.num_machines > 1:
        raise ConfigError(
            "rollout.server=start is for one machine: name the addresses of servers in rollout.server"
        )
    options = [
        f"--dtype={DTYPES[policy.precision]}".replace("torch.", ""),
        "--logprobs-mode=processed_logprobs",
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
    ]
    if longest:
        options.append(f"--max-model-len={max(longest, MOST + 1)}")
    if policy.device.type == "cpu":
        options.append("--no-enable-chunked-prefill")
    if policy.adapter:
        lora = policy.adapter.peft_config["default"]
        rank = max(lora.r, *lora.rank_pattern.values(), 1)
        possible = [most for most in LORA_RANKS if most >= rank]
        options += ["--enable-lora", f"--max-lora-rank={min(possible, default=rank)}"]
    model = base_of(path)
    if os.path.isdir(model):
        model = os.path.abspath(model)
    else:
        model = huggingface_hub.snapshot_download(model, local_files_only=True)
    log = folder / "vllm.log"
    server = StartedServer(config.rollout.vllm_command, model, options, log)
    stack.callback(server.close)
    print(f"starting vLLM (log: {log}) ...", flush=True)
    server.wait(config.runtime.timeout_s / 3)
    return server


class StartedServer:
    """A server and its processes, in a process group of their own: Ctrl-C in the terminal is for
    the trainer."""

    def __init__(self, command: str, model: str, options: list[str], log: Path):
        """Start a server for the folder ``model`` on a free port. Its output goes to ``log``.

        Of two values of an option the last one counts: the command's own options
        (``rollout.vllm_command``) win over ``options``, which are put behind the model, and host
        and port over both.
        """
        words = []
        for word in shlex.split(command):
            words.append(word.replace("{model}", model))
            if "{model}" in word:
                words += options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.log = log
        environment = {
            # The routes that load weights and adapters.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        }
        for name, value in without_environment_defaults(os.environ).items():
            if not LAUNCHER_VARIABLES.fullmatch(name):
                environment.setdefault(name, value)
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-Ic",
                    END_WITH_PARENT,
                    str(os.getpid()),
                    *words,
                    "--host=127.0.0.1",
                    f"--port={port}",
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> None:
        """Return when it answers; ConfigError if it ends, or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.address}/health", timeout=5, trust_env=False).raise_for_status()
                return
            time.sleep(0.2)
        problem = f"does not answer after {timeout_s:g} s (a third of runtime.timeout_s)"
        raise ConfigError(f"vLLM at {self.address} {self.explain(problem)}")

    def explain(self, problem: str) -> str:
        """Its exit code; while it runs, ``problem``. Both with the log's path."""
        code = self.process.poll()
        if code is not None:
            problem = f"has ended (exit code {code})"
        return f"{problem}: see {self.log}"

    def close(self) -> None:
        """End its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)

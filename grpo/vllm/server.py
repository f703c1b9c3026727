"""vLLM servers that the trainer starts on its own machine (``rollout.server=start``), and that end with it."""

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
from grpo.vllm.weights import MOST

DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
"""vLLM's names of the values of ``runtime.precision``."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for ``--max-lora-rank``."""
LAUNCHER_VARIABLES = re.compile(
    "RANK|WORLD_SIZE|(LOCAL|GROUP)_(RANK|WORLD_SIZE)|ROLE_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_.*"
)
"""Environment variables of the trainer's launcher, which would make the server look for other ranks."""
END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Becomes the server's program, which gets SIGTERM when its parent has ended (PR_SET_PDEATHSIG), also by SIGKILL."""


def start_server(
    config: Config, world: World, policy: Policy, path: str, longest: int, folder: Path, stack: contextlib.ExitStack
) -> StartedServer:
    """A server on this machine, when it answers; ``stack`` ends it. Arguments as of :func:`grpo.vllm.build_engine`."""
    settings, path = config.rollout, base_of(path)
    if world.num_machines > 1:
        raise ConfigError("rollout.server=start is for one machine: name the addresses of servers in rollout.server")
    options = ["--dtype", DTYPE_NAMES[policy.precision], "--logprobs-mode", "processed_logprobs"]
    options += ["--enable-scale-out", "--disable-uvicorn-access-log"]
    if longest:
        options += ["--max-model-len", str(max(longest, MOST + 1))]
    if policy.device.type == "cpu":
        options += ["--no-enable-chunked-prefill"]
    if policy.adapter:
        lora = policy.adapter.peft_config["default"]
        rank = max([lora.r, *lora.rank_pattern.values()])
        options += ["--enable-lora", "--max-lora-rank", str(next((most for most in LORA_RANKS if most >= rank), rank))]
    is_folder, log = os.path.isdir(path), folder / "vllm.log"
    model = os.path.abspath(path) if is_folder else huggingface_hub.snapshot_download(path, local_files_only=True)
    server = StartedServer(settings.vllm_command, model, options, log)
    stack.callback(server.close)
    print(f"starting vLLM (log: {log}) ...", flush=True)
    server.wait(config.runtime.timeout_s / 3)
    return server


class StartedServer:
    """A server and its processes, in a process group of their own: Ctrl-C in the terminal is for the trainer."""

    def __init__(self, command: str, model: str, options: list[str], log: Path):
        """Start a server for the folder ``model`` on a free port. Its output goes to ``log``.

        Of two values of an option the last one counts: the command's own options (``rollout.vllm_command``) win over
        ``options``, which are put behind the model, and host and port over both.
        """
        words = shlex.split(command)
        behind_model = max(number for number, word in enumerate(words, 1) if "{model}" in word)
        words[behind_model:behind_model] = options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [word.replace("{model}", model) for word in words]
        self.address, self.log = f"http://127.0.0.1:{port}", log
        found = without_environment_defaults(os.environ)
        found = {name: value for name, value in found.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
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
                # The routes that load weights and adapters.
                env=found | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
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
        return f"{problem if code is None else f'has ended (exit code {code})'}: see {self.log}"

    def close(self) -> None:
        """End its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)

"""A vLLM server that the trainer starts on its machine (``rollout.server=start``). The server ends
when the trainer ends."""

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
from grpo.vllm.weights import DTYPES, MAX_PROBE_TOKENS

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""
LAUNCHER_VARIABLES = re.compile(
    "RANK|WORLD_SIZE|(LOCAL|GROUP)_(RANK|WORLD_SIZE)|ROLE_.*|MASTER_(ADDR|PORT)"
    "|TORCHELASTIC_.*|TORCH_NCCL_.*"
)
"""Pattern of torchrun's environment variables, which would make the server look for other ranks."""
END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Python program that becomes the command in its arguments (``exec``). First it asks the kernel
to send SIGTERM when the parent process ends (PR_SET_PDEATHSIG), even if SIGKILL ends the parent."""


def start_server(
    config: Config,
    world: World,
    policy: Policy,
    path: str,
    longest: int,
    folder: Path,
    stack: contextlib.ExitStack,
) -> StartedServer:
    """Start a server on this machine, and return it once it answers.

    Args:
        path: folder or Hub id of the model, or the folder of an adapter.
        longest: largest number of tokens in a prompt and its completion; 0 if it is not known.
        folder: folder for the server's log.
        stack: exit stack that gets the server's :meth:`StartedServer.close`.

    Raises:
        ConfigError: if the server ends or does not answer in time, or if the run has several
            machines.
    """
    if world.num_machines > 1:
        raise ConfigError(
            "rollout.server=start is for one machine: "
            "name the addresses of servers in rollout.server"
        )
    options = [
        f"--dtype={DTYPES[policy.precision]}".replace("torch.", ""),
        # The log-probs are taken after temperature and filters, from the distribution that is
        # sampled.
        "--logprobs-mode=processed_logprobs",
        # The route that takes and returns token ids.
        "--enable-scale-out",
        # One line per completion would fill the log.
        "--disable-uvicorn-access-log",
    ]
    if longest:
        # A limit below the model's context leaves more memory to the KV cache. The text that proves
        # the weights has to fit, too, with the token that vLLM samples after it.
        max_length = max(longest, MAX_PROBE_TOKENS + 1)
        options.append(f"--max-model-len={max_length}")
    if policy.device.type == "cpu":
        # On a CPU, vLLM 0.32 fails when it splits the prompt of a request with a seed.
        options.append("--no-enable-chunked-prefill")
    if policy.adapter:
        lora = policy.adapter.active_peft_config
        rank = max(lora.r, *lora.rank_pattern.values(), 1)
        # A rank above all of these values is passed on to vLLM, whose error names the possible
        # ranks.
        max_rank = next((possible for possible in LORA_RANKS if possible >= rank), rank)
        options += ["--enable-lora", f"--max-lora-rank={max_rank}"]

    # A model of the Hub is given as its folder, too, which has the files that the trainer has
    # loaded.
    model = base_of(path)
    if os.path.isdir(model):
        model = os.path.abspath(model)
    else:
        model = huggingface_hub.snapshot_download(model, local_files_only=True)
    log = folder / "vllm.log"
    server = StartedServer(config.rollout.vllm_command, model, options, log)
    # The callback is set before waiting: a server that does not answer has to end, too.
    stack.callback(server.close)
    print(f"starting vLLM (log: {log}) ...", flush=True)
    server.wait(config.runtime.timeout_s / 3)
    return server


class StartedServer:
    """A server that this process has started, with its address and its log."""

    def __init__(self, command: str, model: str, options: list[str], log: Path):
        """Start a server on a free port.

        Args:
            command: ``rollout.vllm_command``; ``{model}`` in it stands for the model's folder.
            model: the model's folder.
            options: options of vLLM, which are put behind ``{model}``. Options of the command that
                follow there win over these.
            log: file to which the server's output is appended.
        """
        # If an option is given twice, vLLM takes the last value. So the user's options come after
        # ours. Host and port, which the trainer has to know, come last of all.
        words = []
        for word in shlex.split(command):
            words.append(word.replace("{model}", model))
            if "{model}" in word:
                words += options
        # Bound to port 0, a socket gets a free port, which the server takes once this socket is
        # closed.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.log = log
        environment = {
            # These variables switch on the routes that load weights and adapters.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        }
        # The defaults that the trainer has set for its own memory are not for another program.
        for name, value in without_environment_defaults(os.environ).items():
            if not LAUNCHER_VARIABLES.fullmatch(name):
                environment.setdefault(name, value)
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    # -I isolates the program: no variable or folder of the user changes what Python
                    # imports.
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
                # The server has its own process group: Ctrl-C in the terminal reaches the trainer
                # alone, and close() reaches all processes of the server.
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> None:
        """Wait until the server answers.

        Raises:
            ConfigError: if the server ends, or does not answer within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        # The server refuses connections while it loads the model.
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.address}/health", timeout=5, trust_env=False)
                answer.raise_for_status()
                return
            time.sleep(0.2)
        problem = f"does not answer after {timeout_s:g} s (a third of runtime.timeout_s)"
        raise ConfigError(f"vLLM at {self.address} {self.explain(problem)}")

    def explain(self, problem: str) -> str:
        """Return the text of ``problem`` and the path of the log. If the server has ended, its exit
        code replaces the problem."""
        code = self.process.poll()
        if code is not None:
            problem = f"has ended (exit code {code})"
        return f"{problem}: see {self.log}"

    def close(self) -> None:
        """Ask all processes of the server to end (SIGTERM). Once its main process has ended, or
        after 10 seconds, SIGKILL ends the processes that are left."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)

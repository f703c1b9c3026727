"""Real vLLM servers for tests, from the environment of their own that ``GRPO_VLLM_PYTHON`` names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from grpo.rollout.vllm.keeper import end_group
from grpo.system import end_with_parent

START_SECONDS = 600
"""A server needs 15 s on a quiet machine, and minutes on a busy one."""


def vllm_python() -> str:
    """The Python that has vLLM; the test is skipped where there is none."""
    found = os.environ.get("GRPO_VLLM_PYTHON")
    if not found:
        pytest.skip("needs vLLM 0.32 in an environment of its own: set GRPO_VLLM_PYTHON to its Python")
    return found


class VLLMServer:
    """``vllm serve`` on the CPU, on a free port."""

    def __init__(self, model: Path, log: Path, *arguments: str, dtype: str = "float32"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model, self.log, self.arguments, self.dtype = model, log, arguments, dtype
        self.process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to start; see :meth:`wait`."""
        env = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "OMP_NUM_THREADS": "1",
        }
        env.pop("PYTHONPATH", None)
        command = [
            vllm_python(),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(self.model),
            "--dtype",
            self.dtype,
        ]
        command += [
            "--enforce-eager",
            "--max-model-len",
            "1024",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *self.arguments,
        ]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                cwd=self.log.parent,
                preexec_fn=end_with_parent,
            )

    def wait(self) -> VLLMServer:
        """Wait until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=10).close()
            except OSError:
                time.sleep(0.2)
            else:
                return self

    def stop(self) -> None:
        """End it in a way that leaves nothing in shared memory."""
        if self.process is not None:
            end_group(self.process.pid)
            self.process = None

    def kill(self) -> None:
        """kill -9 of the server and its workers."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

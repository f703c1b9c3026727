"""Real vLLM servers for tests, from the environment of their own that ``GRPO_VLLM_PYTHON``
names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo.vllm.server import StartedServer

START_SECONDS = 600
"""A server needs 15 s on a quiet machine, and minutes on a busy one."""


def vllm_command(*options: str) -> str:
    """``rollout.vllm_command`` for the CPU; the test is skipped where there is no vLLM."""
    found = os.environ.get("GRPO_VLLM_PYTHON")
    if not found:
        pytest.skip(
            "needs vLLM 0.32 in an environment of its own: set GRPO_VLLM_PYTHON to its Python"
        )
    settings = "VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1"
    module = f"{found} -m vllm.entrypoints.openai.api_server --model {{model}} --enforce-eager"
    return " ".join([f"env -u PYTHONPATH {settings} {module}", *options])


class VLLMServer:
    """``vllm serve`` on the CPU, on a free port."""

    def __init__(self, model: Path, log: Path, *options: str, dtype: str = "float32"):
        self.model, self.log, self.started = model, log, None
        self.command = vllm_command("--max-model-len 1024", *options)
        self.options = [
            "--dtype",
            dtype,
            "--logprobs-mode",
            "processed_logprobs",
            "--enable-scale-out",
        ]
        self.options += ["--no-enable-chunked-prefill"]

    @property
    def address(self) -> str:
        return self.started.address

    def start(self) -> None:
        self.started = StartedServer(self.command, str(self.model), self.options, self.log)
        self.started.wait(START_SECONDS)

    def stop(self) -> None:
        if self.started is not None:
            self.started.close()
            self.started = None

"""GPUs that the installed PyTorch cannot use stop the run; they must not turn into CPU ranks, one for each GPU."""

import pytest
import torch

from grpo.config import RuntimeConfig
from grpo.distributed import start_world

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch can use the GPUs of this machine")


@pytest.mark.parametrize(
    ("listed", "device", "hidden", "is_refused"),
    [
        ("GPU 0: NVIDIA H200\nGPU 1: NVIDIA H200", "auto", None, True),
        ("GPU 0: NVIDIA H200", "cpu", None, False),
        ("GPU 0: NVIDIA H200", "auto", "", False),
        ("GPU 0: NVIDIA H200", "auto", "-1", False),
        ("No devices were found", "auto", None, False),
        (None, "auto", None, False),
        (None, "cuda", None, True),
    ],
)
def test_gpus_that_pytorch_cannot_use(tmp_path, monkeypatch, listed, device, hidden, is_refused):
    """``listed``: what ``nvidia-smi`` prints; None: there is no such program."""
    if listed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    if is_refused:
        with pytest.raises(ValueError, match=r"cannot use a GPU of this machine: .*runtime.device=cpu"):
            start_world(RuntimeConfig(device=device))
    else:
        assert start_world(RuntimeConfig(device=device)).device.type == "cpu"

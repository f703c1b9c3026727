"""The device of a rank: its own GPU where there are GPUs, else the CPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import torch

from grpo.system import first_line


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of one of ``local_size`` ranks on this machine; ``wanted`` is ``runtime.device``.

    Raises:
        ValueError: if CUDA is asked for where there is none, GPUs are there that PyTorch cannot use, or there are fewer GPUs than ranks.
    """
    has_cuda = torch.cuda.is_available()
    if wanted != "cpu" and not has_cuda and (count := _nvidia_gpus()):
        raise ValueError(
            f"this machine has {count} NVIDIA GPU(s), but PyTorch cannot use them: {_why_unusable()}; "
            "runtime.device=cpu trains on the CPU"
        )
    if wanted == "cuda" and not has_cuda:
        raise ValueError("runtime.device=cuda, but PyTorch sees no CUDA device: use runtime.device=auto or cpu")
    if wanted == "cpu" or not has_cuda:
        return torch.device("cpu")
    if local_size > (count := torch.cuda.device_count()):
        raise ValueError(
            f"{local_size} processes on this machine, but {count} CUDA devices: use --nproc_per_node={count}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _nvidia_gpus() -> int:
    """GPUs that this process could use, without asking PyTorch; 0 if ``CUDA_VISIBLE_DEVICES`` hides them all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=True)
        return len(re.findall(r"^GPU", listed.stdout, re.MULTILINE))
    except (OSError, subprocess.SubprocessError):  # no such program, or no driver
        return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _why_unusable() -> str:
    """The reason why this PyTorch has no CUDA device, and what to install."""
    version = torch.__version__
    if torch.version.hip:
        return f"PyTorch {version} is built for AMD GPUs; install a build for CUDA (https://pytorch.org/get-started/locally)"
    if torch.version.cuda is None:
        return f"PyTorch {version} is built without CUDA; install a build for CUDA (https://pytorch.org/get-started/locally)"
    try:
        torch.cuda.init()
        error = "it finds none"
    except (RuntimeError, AssertionError) as caught:
        error = first_line(caught).rstrip(".")
    return (
        f"{error}. PyTorch {version} is built for CUDA {torch.version.cuda}: install a driver that is new enough for it, or a build of "
        "PyTorch for the CUDA version that `nvidia-smi` prints (https://pytorch.org/get-started/locally)"
    )

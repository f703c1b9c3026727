"""Environment variables that PyTorch reads when it is imported or first used. This module imports none of it."""

import os
from collections.abc import Mapping

NUM_CACHED_KERNELS = 64
CACHE_NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def set_environment_defaults() -> None:
    """Set what makes memory steady while lengths differ from step to step, unless the user has set it. Called before torch is imported.

    CPU: oneDNN, and PyTorch's interface to it, keep a kernel with its scratch memory for each of up to 1,024 shapes: half a GiB after
    20 short steps of a model of 7M parameters under bf16 (``benchmarks/memory.py``).

    Inductor, which compiles 8-bit AdamW and parts of decode steps, would start 16 processes in each rank.

    CUDA: segments of fixed size would fragment, so let the allocator grow its segments. CUDA graphs keep pools of their own either way.
    Known to fail with such segments: collectives inside of CUDA graphs (pytorch/pytorch#158029), which are not used here, and sharing CUDA
    tensors between processes. torch 2.11 and later read ``PYTORCH_ALLOC_CONF`` (2.9 did not, pytorch/pytorch#183387);
    ``PYTORCH_CUDA_ALLOC_CONF``, its older name, still wins over it.
    """
    for name in CACHE_NAMES:
        os.environ.setdefault(name, str(NUM_CACHED_KERNELS))
    os.environ.setdefault(COMPILE_THREADS, "1")
    if not any(name in os.environ for name in ALLOCATOR_NAMES):
        os.environ["PYTORCH_ALLOC_CONF"] = EXPANDABLE


def without_environment_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment for another program, without what :func:`set_environment_defaults` set."""
    defaults = {name: str(NUM_CACHED_KERNELS) for name in CACHE_NAMES}
    defaults |= {"PYTORCH_ALLOC_CONF": EXPANDABLE, COMPILE_THREADS: "1"}
    return {name: value for name, value in environment.items() if defaults.get(name) != value}

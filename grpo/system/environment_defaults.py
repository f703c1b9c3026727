"""Environment variables that libraries read when they are imported or first used. This module imports none of them."""

import os


def set_allocator_defaults() -> None:
    """Let PyTorch's CUDA allocator grow its segments, unless the user has set one of its variables. Before torch is imported.

    Completions, and so micro-batches, have new lengths in every step: with segments of fixed size, memory fragments. CUDA graphs keep
    pools of their own either way. Known to fail with such segments: collectives inside of CUDA graphs (pytorch/pytorch#158029) and
    sharing CUDA tensors between processes; neither is done here. torch 2.11 and later read ``PYTORCH_ALLOC_CONF``
    (2.9 did not, pytorch/pytorch#183387); ``PYTORCH_CUDA_ALLOC_CONF``, its older name, still wins over it.
    """
    if not any(
        name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

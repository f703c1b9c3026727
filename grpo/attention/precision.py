"""The precision of fp32 matrix products on CUDA."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def ieee_fp32() -> Iterator[None]:
    """Inside the block, CUDA multiplies fp32 matrices in fp32; afterwards as it was told before.

    TF32, which a program or a container (``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``) may have switched
    on for products and PyTorch switches on for convolutions, has 10 bits of mantissa: checks that
    compare two ways to compute a layer would fail."""
    # PyTorch's kernels read `fp32_precision`. The older `allow_tf32` cannot be read after it has
    # been set.
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def is_close(found_N: torch.Tensor, expected_N: torch.Tensor, bound: float) -> bool:
    """True if no difference exceeds ``bound`` standard deviations of the expected values."""
    difference = (found_N - expected_N).abs().max()
    return bool(difference <= bound * expected_N.std())

"""The precision of fp32 matrix products on CUDA."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def ieee_fp32() -> Iterator[None]:
    """Inside the block, CUDA multiplies fp32 matrices in fp32. Settings are restored afterwards.

    With TF32, which has 10 bits of mantissa, checks that compare two ways to compute a layer would
    fail. A program or a container (``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``) may have switched TF32
    on for products, and PyTorch switches TF32 on for convolutions.
    """
    # PyTorch's kernels read `fp32_precision`. The older `allow_tf32` cannot be read after it has
    # been set.
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    precisions = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, precisions, strict=True):
            setting.fp32_precision = precision


def is_close(x_N: torch.Tensor, expected_N: torch.Tensor, bound: float) -> bool:
    """True if no difference exceeds ``bound`` standard deviations of the expected values."""
    difference_N = (x_N - expected_N).abs()
    # The scale is the spread of the values, not their size: log-probs may all be near -10.
    return bool(difference_N.max() <= bound * expected_N.std())

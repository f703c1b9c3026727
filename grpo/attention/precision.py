"""The precision of fp32 matrix products on CUDA."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def ieee_fp32() -> Iterator[None]:
    """Inside the block, CUDA multiplies fp32 matrices in fp32; afterwards as it was told before. The CPU is not concerned.

    TF32, which a program or a container (``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``) may have switched on for products and PyTorch switches on
    for convolutions, has 10 bits of mantissa. Two correct ways to compute a layer then differ by far more than rounding in fp32, and checks
    that compare them would fail.
    """
    # `fp32_precision` is what PyTorch's kernels read. The older `allow_tf32` cannot be read after `fp32_precision` has been set.
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision

"""What CUDA kernels compute that CPU kernels do not: products in TF32, and half-precision inputs with fp32 outputs."""

from __future__ import annotations

import torch

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
WITH_DTYPE = {aten.mm.dtype, aten.bmm.dtype}
SOFTMAX = {aten._softmax.default, aten._log_softmax.default}


def compute(func, args: tuple, kwargs: dict):
    """The result of an operation on plain CPU tensors, as CUDA computes it."""
    if func in PRODUCTS and torch.backends.cuda.matmul.fp32_precision == "tf32":
        *summand, a, b = args
        return func(*summand, *map(to_tf32, (a, b)), **kwargs)
    if func in WITH_DTYPE:
        a, b, dtype = args
        return a.to(dtype) @ b.to(dtype)
    if func in SOFTMAX:
        x, dim, half_to_float = args
        return func(x.float() if half_to_float else x, dim, False)
    return func(*args, **kwargs)


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to TF32's 10 bits of mantissa, to nearest even."""
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    return (((bits + 0x0FFF + ((bits >> 13) & 1)) >> 13) << 13).view(torch.float32)

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
    if func._schema.name == "torch_attn::_varlen_attn":
        return varlen_attention(*args)
    return func(*args, **kwargs)


def varlen_attention(q, k, v, ends_q, ends_k, max_q, max_k, is_causal, scale, window, gqa, used_k, *_):
    """``torch.nn.attention.varlen`` without a window: output ``[T, H, D]``, log-sum-exp ``[H, T]``, random state."""
    assert q.dtype in (torch.bfloat16, torch.float16) and q.shape[1] == k.shape[1] and not is_causal
    out, log_z = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for first_q, end_q, first_k, used in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], used_k, strict=True):
        queries, keys = slice(first_q, end_q), slice(first_k, first_k + used)
        assert 0 < end_q - first_q <= max_q and 0 < used <= max_k and first_k + used <= len(k)
        scores = scale * torch.einsum("qhd,khd->hqk", q[queries].float(), k[keys].float())
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v[keys].float()).to(q.dtype)
        log_z[:, queries] = scores.logsumexp(dim=-1)
    return out, log_z, torch.zeros(2, dtype=torch.uint64)


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to TF32's 10 bits of mantissa, to nearest even."""
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    return (((bits + 0x0FFF + ((bits >> 13) & 1)) >> 13) << 13).view(torch.float32)

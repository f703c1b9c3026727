"""What CUDA kernels compute that CPU kernels do not: fused attention, fused norms, products in TF32 and with another output dtype."""

from __future__ import annotations

import math

import torch

aten = torch.ops.aten
REPLACED = {}


def compute(func, args: tuple, kwargs: dict):
    """The result of an operation on plain CPU tensors, as CUDA computes it."""
    return REPLACED.get(func, func)(*args, **kwargs)


def replaces(*operations):
    def register(function):
        REPLACED.update(dict.fromkeys(operations, function))
        return function

    return register


def tf32_is_on() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to TF32's 10 bits of mantissa, to nearest even."""
    bits = x.contiguous().view(torch.int32)
    return (((bits + 0x0FFF + ((bits >> 13) & 1)) >> 13) << 13).view(torch.float32)


def _factors(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [to_tf32(x) if x.dtype == torch.float32 and tf32_is_on() else x for x in tensors]


@replaces(aten.mm.default, aten.bmm.default)
def _product(a, b):
    a, b = _factors(a, b)
    return a @ b


@replaces(aten.addmm.default, aten.baddbmm.default)
def _product_and_sum(c, a, b, *, beta=1, alpha=1):
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    return add(c, *_factors(a, b), beta=beta, alpha=alpha)


@replaces(aten.bmm.dtype, aten.mm.dtype)
def _product_with_dtype(a, b, out_dtype):
    return (a.to(out_dtype) @ b.to(out_dtype)).to(out_dtype)


@replaces(aten._softmax.default)
def _softmax(x, dim, half_to_float):
    return aten._softmax(x.float() if half_to_float else x, dim, False)


@replaces(aten._log_softmax.default)
def _log_softmax(x, dim, half_to_float):
    return aten._log_softmax(x.float() if half_to_float else x, dim, False)


@replaces(aten._fused_rms_norm.default)
def _rms_norm(x, shape, weight, eps):
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    y = x.float() * scale
    return (y if weight is None else y * weight.float()).to(x.dtype), scale


@replaces(aten._fused_rms_norm_backward.default)
def _rms_norm_backward(grad, x, shape, scale, weight, mask):
    normed, grad = x.float() * scale, grad.float()
    grad_normed = grad if weight is None else grad * weight.float()
    grad_x = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    grad_weight = None if weight is None else (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
    return grad_x.to(x.dtype), grad_weight


def _scores(q, k, bias, is_causal: bool, scale: float | None) -> torch.Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores


def _attention(q, k, v, bias, is_causal, scale):
    """Output in the memory layout of the fused kernels (heads beside each other for each token), and the log-normalizers."""
    scores = _scores(q, k, bias, is_causal, scale)
    log_z = scores.logsumexp(-1)
    log_z = log_z.masked_fill(log_z == -math.inf, 0.0)  # a query that sees no key gets zeros
    out = ((scores - log_z[..., None]).exp() @ v.float()).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), log_z


def _attention_backward(grad, q, k, v, bias, out, log_z, is_causal, scale):
    weights, grad = (_scores(q, k, bias, is_causal, scale) - log_z[..., None]).exp(), grad.float()
    grad_v = weights.transpose(-1, -2) @ grad
    grad_scores = weights * (grad @ v.float().transpose(-1, -2) - (grad * out.float()).sum(-1, keepdim=True))
    grad_scores = grad_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    grad_q, grad_k = grad_scores @ k.float(), grad_scores.transpose(-1, -2) @ q.float()
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


@replaces(aten._scaled_dot_product_efficient_attention.default)
def _efficient(q, k, v, bias, compute_log_z, dropout_p=0.0, is_causal=False, *, scale=None):
    out, log_z = _attention(q, k, v, bias, is_causal, scale)
    return (
        out,
        log_z if compute_log_z else log_z.new_empty(0),
        torch.zeros((), dtype=torch.long),
        torch.zeros((), dtype=torch.long),
    )


@replaces(aten._scaled_dot_product_efficient_attention_backward.default)
def _efficient_backward(grad, q, k, v, bias, out, log_z, seed, offset, dropout_p, mask, is_causal=False, *, scale=None):
    return (*_attention_backward(grad, q, k, v, bias, out, log_z, is_causal, scale), None)


@replaces(aten._scaled_dot_product_flash_attention.default)
def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, log_z = _attention(q, *_repeated(q, k, v), None, is_causal, scale)
    seed, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, log_z, None, None, q.shape[2], k.shape[2], seed, unused, q.new_empty(0)


@replaces(aten._scaled_dot_product_flash_attention_backward.default)
def _flash_backward(
    grad, q, k, v, out, log_z, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, unused, *, scale=None
):
    grads = _attention_backward(grad, q, *_repeated(q, k, v), None, out, log_z, is_causal, scale)
    return grads[0], *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in grads[1:])


def _repeated(q, k, v):
    """Keys and values once for each query head."""
    return (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))

"""Weights in the layout of the CPU's matrix kernels, for the time of a rollout.

A decode step multiplies a few rows with every weight, and a plain product re-orders the weight each time. oneDNN's linear takes
weights that were re-ordered once: measured on two cores with 32 rows, 20 to 40% off each product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

_ops = torch.ops.mkldnn


@contextlib.contextmanager
def reordered_weights(model: nn.Module, precision: str) -> Iterator[None]:
    """Linear layers compute from a re-ordered copy of their weights (bf16 where autocast would use bf16).

    Does nothing where the model is not on a CPU, or its kernels or this build of PyTorch have no such layout. The model's own
    weights must not change meanwhile.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layers = [module for module in model.modules() if type(module) is nn.Linear and module.weight.device.type == "cpu"]
    layers = [layer for layer in layers if layer.weight.dtype == torch.float32 and "forward" not in vars(layer)]
    if not layers or not _is_there(dtype):
        yield
        return
    try:
        for layer in layers:
            weight = _ops._reorder_linear_weight(layer.weight.detach().to(dtype), None)
            bias = None if layer.bias is None else layer.bias.detach().to(dtype)
            layer.forward = partial(_linear, weight=weight, bias=bias, dtype=dtype)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _linear(x: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return _ops._linear_pointwise(x.to(dtype), weight, bias, "none", [], "")


def _is_there(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(_ops, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or _ops._is_mkldnn_bf16_supported()

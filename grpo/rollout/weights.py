"""Weights as a rollout wants them: copied once, then read at every token.

- In the dtype they are multiplied in: autocast would convert fp32 masters to bf16 again at every token.
- On CPU in the layout of oneDNN's kernels: a plain product re-orders the weight each time (measured on two cores with 32 rows, 20 to
  40% off each product).
- Layers that read the same input (queries, keys and values; the two halves of a gated MLP) as one product: each call costs some
  15 us by itself, whatever its size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

_ops = torch.ops.mkldnn
SHARE_THEIR_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of siblings that are called with the same tensor in most architectures; if they are not, each is computed for itself."""


class Product:
    """The outputs of several linear layers for one input, computed together."""

    def __init__(self, layers: list[nn.Linear], dtype: torch.dtype):
        self.dtype, self.sizes, self.layers = dtype, [layer.out_features for layer in layers], layers
        self.weight = torch.cat([layer.weight.detach() for layer in layers]).to(dtype)
        self.bias = None
        if any(layer.bias is not None for layer in layers):
            biases = [torch.zeros_like(layer.weight[:, 0]) if layer.bias is None else layer.bias for layer in layers]
            self.bias = torch.cat(biases).detach().to(dtype)
        self.is_reordered = _can_reorder(self.weight)
        if self.is_reordered:
            self.weight = _ops._reorder_linear_weight(self.weight, None)
        self._x: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def refresh(self) -> None:
        """Take the layers' weights as they are now, at the same address (not where they have been re-ordered)."""
        for number, (weight, layer) in enumerate(zip(self.weight.split(self.sizes), self.layers, strict=True)):
            weight.copy_(layer.weight.detach())
            if self.bias is not None and layer.bias is not None:
                self.bias.split(self.sizes)[number].copy_(layer.bias.detach())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layers' outputs side by side, ``[..., sum(out_features)]``."""
        if self.is_reordered:
            return _ops._linear_pointwise.default(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return F.linear(x.to(self.dtype), self.weight, self.bias)

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """One layer's output, kept for the next layer if that is called with the same tensor."""
        if x is not self._x:
            self._x, self._outputs = x, self(x).split(self.sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._x, self._outputs = None, ()
        return output


class _Part:
    """``forward`` of one of the layers."""

    def __init__(self, product: Product, number: int):
        self.product, self.number = product, number

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.part(self.number, x)


@contextlib.contextmanager
def rollout_weights(
    model: nn.Module, precision: str, kept: dict[nn.Linear, Product] | None = None
) -> Iterator[dict[nn.Linear, Product]]:
    """Linear layers compute from copies of their weights, where a copy is faster.

    The model's own weights must not change meanwhile. Nothing is copied in fp32 on a GPU, or for layers that are not plain
    ``nn.Linear`` with fp32 weights.

    Args:
        kept: the copies outlive the rollout here, and the next one refreshes them in place: captured steps know their addresses.

    Yields:
        The product of each layer; siblings have the same one.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layers = [m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.float32]
    layers = [m for m in layers if "forward" not in vars(m) and (dtype == torch.bfloat16 or _can_reorder(m.weight))]
    products: dict[nn.Linear, Product] = {} if kept is None else kept
    try:
        if products:
            for product in dict.fromkeys(products.values()):
                product.refresh()
        else:
            for siblings in _siblings(model, layers):
                products |= dict.fromkeys(siblings, Product(siblings, dtype))
        layers = list(products)
        for layer, product in products.items():
            layer.forward = _Part(product, product.layers.index(layer))
        yield products
    finally:
        for layer in layers:  # whatever has become of the copies
            vars(layer).pop("forward", None)


def _siblings(model: nn.Module, layers: list[nn.Linear]) -> list[list[nn.Linear]]:
    """The layers, those that share their input together."""
    left = dict.fromkeys(layers)
    groups = []
    for parent in model.modules():
        for names in SHARE_THEIR_INPUT:
            group = [getattr(parent, name, None) for name in names]
            if all(layer in left for layer in group) and len({layer.in_features for layer in group}) == 1:
                groups.append(group)
                for layer in group:
                    del left[layer]
    return groups + [[layer] for layer in left]


def _can_reorder(weight: torch.Tensor) -> bool:
    if (
        weight.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
        or not hasattr(_ops, "_linear_pointwise")
    ):
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _ops._is_mkldnn_bf16_supported())

"""Copies of linear layers' weights for the time of a rollout, in the form that every decode step reads fastest.

- In the dtype of the product: autocast would cast the fp32 master weights to bf16 again at every token.
- On CPU in the memory layout of oneDNN's kernels: reordering takes 20 to 40% of a plain product (32 rows, two cores).
- Layers with the same input (queries, keys and values; a gated MLP) as one product: each call costs about 15 us.
- With LoRA, the sum ``W + scale * B @ A``, added up in fp32: one product instead of three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from grpo.distributed import gathered
from grpo.model import HalfLinear, adapted_base, decoder_layers, effective_weight

_mkldnn = torch.ops.mkldnn
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that most models call with the same tensor; with different ones, each has its own output."""


class FusedLinear:
    """Several linear layers with the same input as one product, computed from a copy of their weights."""

    def __init__(self, layers: list[nn.Linear], dtype: torch.dtype):
        self.layers, self.dtype = layers, dtype
        self.sizes = [layer.out_features for layer in layers]
        self.weight = torch.cat([effective_weight(layer).to(dtype) for layer in layers])
        biases = [self.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        has_bias = any(layer.bias is not None for layer in layers)
        self.bias = torch.cat(biases).detach().to(dtype) if has_bias else None
        self.is_reordered = _can_reorder(self.weight)
        if self.is_reordered:
            self.weight = _mkldnn._reorder_linear_weight(self.weight, None)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers side by side, ``[..., sum(out_features)]``."""
        if self.is_reordered:
            return _mkldnn._linear_pointwise.default(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return F.linear(x.to(self.dtype), self.weight, self.bias)

    def output_of(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The output of one layer. The first call with a tensor computes all, and the last layer's call drops them."""
        if x is not self._input:
            self._input, self._outputs = x, self(x).split(self.sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output


Copies = dict[nn.Linear, FusedLinear]
"""The copy of each layer; layers with the same input share one."""
Pairs = list[tuple[nn.Module, nn.Module]]
"""Modules of this rank's own model, each with the module of the sharded one that has its weights."""


class CopiedLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` in the model, has the same parameters, and computes from their copy."""

    def __init__(self, layer: nn.Linear, fused: FusedLinear):
        super().__init__()
        self.in_features, self.out_features, self.training = layer.in_features, layer.out_features, layer.training
        self.weight, self.bias = layer.weight, layer.bias
        self.fused, self.number = fused, fused.layers.index(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused.output_of(self.number, x)


@contextlib.contextmanager
def in_place_of(model: nn.Module, copies: Copies) -> Iterator[None]:
    """Inside the block, the model computes from these copies."""
    children = ((parent, *named) for parent in model.modules() for named in parent.named_children())
    places = [(parent, name, child) for parent, name, child in children if child in copies]
    try:
        for parent, name, child in places:
            setattr(parent, name, CopiedLinear(child, copies[child]))
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


def copied_weights(model: nn.Module, precision: str) -> contextlib.AbstractContextManager[None]:
    """Inside the block, linear layers compute from copies of their weights, which must not change meanwhile."""
    return in_place_of(model, copies_of(list(model.modules()), precision))


def copies_of(modules: list[nn.Module], precision: str) -> Copies:
    """The copies of those of these modules that are worth copying; see :func:`copied_weights`."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    inside = {part for module in modules if adapted_base(module) for part in list(module.modules())[1:]}
    layers = {module: None for module in modules if module not in inside and _is_worth_copying(module, dtype)}
    siblings = [[getattr(parent, name, None) for name in names] for parent in modules for names in SAME_INPUT]
    copies: Copies = {}
    for group in [*siblings, *([layer] for layer in layers)]:
        is_left = all(layer in layers and layer not in copies for layer in group)
        if is_left and len({layer.in_features for layer in group}) == 1:
            copies |= dict.fromkeys(group, FusedLinear(group, dtype))
    return copies


class GatheredWeights:
    """The weights of a rollout when ranks hold shares of the model: gathered layer by layer into a model of the rank.

    That model has no weights between rollouts. While a layer is gathered in fp32, it is copied, and what is not copied
    (embedding, norms) is cloned. After that no decode step communicates: ranks may decode different numbers of steps.
    """

    def __init__(self, root: nn.Module, model: PreTrainedModel, own: PreTrainedModel):
        """
        Args:
            root: the sharded module whose root group holds what is in no layer of ``model``.
            model: the sharded model.
            own: a model of the same modules with all parameters on the meta device.
        """
        self.own = own
        self.parts: list[tuple[nn.Module, Pairs]] = []
        """Each layer of the sharded model, then the root for all that is in none, with the modules of both models."""
        rest = dict(zip(own.modules(), model.modules(), strict=True))
        for mine, theirs in zip(decoder_layers(own), decoder_layers(model), strict=True):
            self.parts.append((theirs, [(part, rest.pop(part)) for part in mine.modules() if part in rest]))
        self.parts.append((root, list(rest.items())))

    @contextlib.contextmanager
    def copied(self, precision: str, *, fast_decode: bool) -> Iterator[None]:
        """Inside the block the own model has the weights of this moment. All ranks enter it together."""
        copies: Copies = {}
        try:
            with torch.no_grad():
                for source, pairs in self.parts:
                    with gathered(source):
                        copies |= self._take(pairs, precision, fast_decode)
            with in_place_of(self.own, copies):
                yield
        finally:
            for module in self.own.modules():
                _drop(module)

    def _take(self, pairs: Pairs, precision: str, fast_decode: bool) -> Copies:
        """Copy and clone the weights of a part while they are gathered."""
        for mine, theirs in pairs:
            mine._parameters.update(theirs._parameters)
        copies = copies_of([mine for mine, _ in pairs], precision) if fast_decode else {}
        for copied in copies:  # of an adapted layer also base and matrices
            for module in copied.modules():
                _drop(module)
        cloned: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
        for mine, _ in pairs:
            for name, weight in mine._parameters.items():
                if weight is not None and not weight.is_meta:
                    if weight not in cloned:
                        cloned[weight] = nn.Parameter(weight.detach().clone(), requires_grad=False)
                    mine._parameters[name] = cloned[weight]
        return copies


def _drop(module: nn.Module) -> None:
    """Free the module's own weights."""
    for name, weight in module._parameters.items():
        if weight is not None and not weight.is_meta:
            module._parameters[name] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


def _is_worth_copying(module: nn.Module, dtype: torch.dtype) -> bool:
    """True for a plain linear layer with its own ``forward`` and no hooks; in fp32 only if oneDNN can reorder.

    A layer with an adapter is copied always: three products become one.
    """
    base = adapted_base(module)
    layers = [module] if base is None else [module, base]
    if type(layers[-1]) not in (nn.Linear, HalfLinear) or module.weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    if any("forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return False
    return base is not None or dtype == torch.bfloat16 or _can_reorder(module.weight)


def _can_reorder(weight: torch.Tensor) -> bool:
    """True if oneDNN can multiply with a reordered copy of this weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _mkldnn._is_mkldnn_bf16_supported())

"""Copies of linear layers' weights for the time of a rollout, in the form that every decode step reads fastest.

- In the dtype of the product: autocast would cast the fp32 master weights to bf16 again at every token.
- On CPU in the memory layout of oneDNN's kernels: reordering takes 20 to 40% of a plain product (32 rows, two cores).
- Layers with the same input (queries, keys and values; a gated MLP) as one product: each call costs about 15 us.
- With LoRA, the sum ``W + scale * B @ A``, added up in fp32: one product instead of three.
"""

from __future__ import annotations

import contextlib
import copy
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
        self.layers = layers
        self.dtype = dtype
        self.sizes = [layer.out_features for layer in layers]
        self.weight = torch.cat([effective_weight(layer).to(dtype) for layer in layers])
        self.bias = None
        if layers[0].bias is not None:
            self.bias = torch.cat([layer.bias for layer in layers]).detach().to(dtype)
        if _can_reorder(self.weight):
            self.weight = _mkldnn._reorder_linear_weight(self.weight, None)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers side by side, ``[..., sum(out_features)]``."""
        x = x.to(self.dtype)
        if self.weight.is_mkldnn:
            return _mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def output_of(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The output of one layer. The first call with a tensor computes all, and the last layer's call drops them."""
        if x is not self._input:
            self._input = x
            self._outputs = self(x).split(self.sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._input = None
            self._outputs = ()
        return output


Copies = dict[nn.Linear, FusedLinear]
"""The copy of each layer; layers with the same input share one."""


class CopiedLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` in the model, has the same parameters, and computes from their copy."""

    def __init__(self, layer: nn.Linear, fused: FusedLinear):
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.training = layer.training
        self.weight = layer.weight
        self.bias = layer.bias
        self.fused = fused
        self.number = fused.layers.index(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused.output_of(self.number, x)


@contextlib.contextmanager
def in_place_of(model: nn.Module, copies: Copies) -> Iterator[None]:
    """Inside the block, the model computes from these copies."""
    places = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if child in copies:
                places.append((parent, name, child))
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
    inside_adapted = set()
    layers = {}
    for module in modules:
        if module not in inside_adapted and _is_worth_copying(module, dtype):
            layers[module] = None
        if adapted_base(module):
            inside_adapted.update(module.modules())

    copies: Copies = {}
    for parent in modules:
        for names in SAME_INPUT:
            siblings = [getattr(parent, name, None) for name in names]
            if not all(layer in layers for layer in siblings):
                continue
            shapes = {(layer.in_features, layer.bias is None) for layer in siblings}
            if len(shapes) == 1:
                copies |= dict.fromkeys(siblings, FusedLinear(siblings, dtype))
    for layer in layers:
        if layer not in copies:
            copies[layer] = FusedLinear([layer], dtype)
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
        self.empty = {module: dict(module._parameters) for module in own.modules()}
        """The parameters on the meta device that each module of the rank's model has between rollouts."""

        self.parts: list[tuple[nn.Module, dict[nn.Module, nn.Module]]] = []
        """Each layer of the sharded model, then the root for all that is in none: with each of its modules, by the
        module of the rank's model."""
        rest = dict(zip(own.modules(), model.modules(), strict=True))
        for own_layer, layer in zip(decoder_layers(own), decoder_layers(model), strict=True):
            sources = {module: rest.pop(module) for module in own_layer.modules() if module in rest}
            self.parts.append((layer, sources))
        self.parts.append((root, rest))

    @contextlib.contextmanager
    def copied(self, precision: str, *, fast_decode: bool) -> Iterator[None]:
        """Inside the block the own model has the weights of this moment. All ranks enter it together."""
        copies: Copies = {}
        try:
            with torch.no_grad():
                for part, sources in self.parts:
                    with gathered(part):
                        copies |= self._take(sources, precision, fast_decode)
            with in_place_of(self.own, copies):
                yield
        finally:
            for module, parameters in self.empty.items():
                module._parameters.update(parameters)

    def _take(self, sources: dict[nn.Module, nn.Module], precision: str, fast_decode: bool) -> Copies:
        """Copy or clone the weights of a part while they are gathered."""
        for module, source in sources.items():
            module._parameters.update(source._parameters)
        copies = copies_of(list(sources), precision) if fast_decode else {}

        # With an adapted layer, its base and matrices are copied.
        copied = {part for layer in copies for part in layer.modules()}
        tied = {}  # a weight of two modules is cloned once
        for module, source in sources.items():
            if module in copied:
                parameters = self.empty[module]
            else:
                parameters = copy.deepcopy(source._parameters, tied)
            module._parameters.update(parameters)
        return copies


def _is_worth_copying(module: nn.Module, dtype: torch.dtype) -> bool:
    """True for a plain linear layer with its own ``forward`` and no hooks; in fp32 only if oneDNN can reorder.

    A layer with an adapter is copied always: three products become one.
    """
    base = adapted_base(module)
    linear = base or module
    if type(linear) not in (nn.Linear, HalfLinear):
        return False
    if linear.weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    for layer in (module, linear):
        if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
            return False
    return base is not None or dtype == torch.bfloat16 or _can_reorder(linear.weight)


def _can_reorder(weight: torch.Tensor) -> bool:
    """True if oneDNN can multiply with a reordered copy of this weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or _mkldnn._is_mkldnn_bf16_supported()

"""Copies of linear layers' weights for the time of a rollout, in the form that every decode step
reads fastest.

- In the dtype of the product: autocast would cast the fp32 master weights to bf16 again at every
  token.
- On CPU in the memory layout of oneDNN's kernels: reordering takes 20 to 40% of a plain product (32
  rows, two cores).
- Layers with the same input (queries, keys and values; a gated MLP) as one product: each call costs
  about 15 us.
- With LoRA, the sum ``W + scale * B @ A``, added up in fp32: one product instead of three.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo.distributed import gathered
from grpo.model import HalfLinear, adapted_base, decoder_layers, effective_weight

_mkldnn = torch.ops.mkldnn
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that most models call with the same tensor; with different ones, each has
its own output."""


class FusedLinear:
    """Several linear layers with the same input as one product, computed from a copy of their
    weights."""

    def __init__(self, layers: list[nn.Linear], dtype: torch.dtype):
        self.layers = layers
        self.dtype = dtype
        self.sizes = [layer.out_features for layer in layers]

        self.weight = torch.cat([effective_weight(layer).to(dtype) for layer in layers])
        if _can_reorder(self.weight):
            self.weight = _mkldnn._reorder_linear_weight(self.weight, None)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases).to(dtype) if biases else None

        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of all layers side by side, ``[..., sum(out_features)]``."""
        x = x.to(self.dtype)
        if self.weight.is_mkldnn:
            return _mkldnn._linear_pointwise(
                x,
                self.weight,
                self.bias,
                "none",  # no operation after it
                [],
                "",
            )
        return F.linear(x, self.weight, self.bias)

    def output_of(self, number: int, x: Tensor) -> Tensor:
        """The output of one layer. The first call with a tensor computes all, and the last layer's
        call drops them."""
        if x is not self._input:
            self._outputs = self(x).split(self.sizes, dim=-1)
            self._input = x
        output = self._outputs[number]
        if number == len(self.layers) - 1:
            self._input = None
            self._outputs = ()
        return output


class CopiedLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` in the model, has the same parameters, and computes from
    their copy."""

    def __init__(self, layer: nn.Linear, fused: FusedLinear):
        super().__init__()
        # Some models read a layer's weight, dtype or size.
        base = adapted_base(layer) or layer
        vars(self).update(vars(base))
        self.fused = fused
        self.number = fused.layers.index(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.output_of(self.number, x)


Copies = dict[nn.Linear, FusedLinear]
"""The copy of each layer; layers with the same input share one."""


@contextlib.contextmanager
def in_place_of(model: nn.Module, copies: Copies) -> Iterator[None]:
    """Inside the block, the model computes from these copies."""
    layers = {name: module for name, module in model.named_modules() if module in copies}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, CopiedLinear(layer, copies[layer]))
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def copied_weights(model: nn.Module, precision: str) -> contextlib.AbstractContextManager[None]:
    """Inside the block, linear layers compute from copies of their weights, which must not change
    meanwhile."""
    return in_place_of(model, copies_of(list(model.modules()), precision))


def copies_of(modules: list[nn.Module], precision: str) -> Copies:
    """The copies of those of these modules that are worth copying; see :func:`copied_weights`."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layers = []
    inside_adapted = set()
    for module in modules:
        if module not in inside_adapted and _is_worth_copying(module, dtype):
            layers.append(module)
        if adapted_base(module):
            inside_adapted.update(module.modules())

    copies: Copies = {}
    for parent in modules:
        for names in SAME_INPUT:
            siblings = [getattr(parent, name, None) for name in names]
            if all(layer in layers for layer in siblings):
                copies |= dict.fromkeys(siblings, FusedLinear(siblings, dtype))
    for layer in layers:
        if layer not in copies:
            copies[layer] = FusedLinear([layer], dtype)
    return copies


class GatheredWeights:
    """The weights of a rollout when ranks hold shares of the model: gathered layer by layer into a
    model of the rank.

    That model has no weights between rollouts. While a layer is gathered in fp32, it is copied, and
    what is not copied (embedding, norms) is cloned. After that no decode step communicates: ranks
    may decode different numbers of steps."""

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        rollout_model: nn.Module,
    ):
        """
        Args:
            root: the sharded module whose root group holds what is in no layer of ``model``.
            model: the sharded model.
            rollout_model: a model of the same modules with all parameters on the meta device.
        """
        self.root = root
        self.rollout_model = rollout_model
        self.sources = dict(zip(rollout_model.modules(), model.modules(), strict=True))
        """The sharded model's module for each module of the rank's model."""
        self.empty = {module: dict(module._parameters) for module in rollout_model.modules()}
        """The parameters on the meta device that each module of the rank's model has between
        rollouts."""

    @contextlib.contextmanager
    def copied(self, precision: str, *, fast_decode: bool) -> Iterator[None]:
        """Inside the block the rank's model has the weights of this moment. All ranks enter it
        together."""
        layers = decoder_layers(self.rollout_model)
        layer_of = {part: layer for layer in layers for part in layer.modules()}
        copies: Copies = {}
        try:
            for layer in [*layers, None]:  # None: what is in no layer
                modules = [module for module in self.sources if layer_of.get(module) is layer]
                source = self.root if layer is None else self.sources[layer]
                with torch.no_grad(), gathered(source):
                    for module in modules:
                        module._parameters.update(self.sources[module]._parameters)
                    if fast_decode:
                        copies |= copies_of(modules, precision)
                    # With a layer that has an adapter, its base and matrices are copied.
                    copied = {part for linear in copies for part in linear.modules()}
                    tied = {}  # a weight of two modules is cloned once
                    for module in modules:
                        parameters = self.empty[module]
                        if module not in copied:
                            parameters = copy.deepcopy(module._parameters, tied)
                        module._parameters.update(parameters)
            with in_place_of(self.rollout_model, copies):
                yield
        finally:
            for module, parameters in self.empty.items():
                module._parameters.update(parameters)


def _is_worth_copying(module: nn.Module, dtype: torch.dtype) -> bool:
    """True for a plain linear layer with its own ``forward`` and no hooks; in fp32 only if oneDNN
    can reorder.

    A layer with an adapter is copied always: three products become one.
    """
    linear = adapted_base(module) or module
    if type(linear) not in (nn.Linear, HalfLinear):
        return False
    for layer in (module, linear):
        if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
            return False
    if dtype == torch.bfloat16 or linear is not module:
        return True
    return _can_reorder(linear.weight)


def _can_reorder(weight: Tensor) -> bool:
    """True if oneDNN can multiply with a reordered copy of this weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or _mkldnn._is_mkldnn_bf16_supported()

"""Copies of linear layers' weights for the time of a rollout, in the form that every decode step
reads fastest.

- A copy has the dtype of the product. Otherwise autocast would cast the fp32 master weights to bf16
  again at every token.
- A copy on CPU has the memory layout of oneDNN's kernels. Otherwise each product would reorder the
  weight, which takes 20 to 40% of the product's time (32 rows, two cores).
- Layers with the same input (queries, keys and values; a gated MLP) are one product, since each
  call costs about 15 us.
- A layer with LoRA is the sum ``W + scale * B @ A``, added up in fp32. This is one product instead
  of three.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from grpo.distributed import unsharded
from grpo.model import BF16Linear, adapted_base, decoder_layers, effective_weight

_mkldnn = torch.ops.mkldnn
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that most models call with the same tensor, so that one matrix product is
enough for all siblings. If a model calls them with different tensors, the outputs are still right:
each call with another tensor computes the product again."""


class FusedLinear:
    """Linear layers with the same input, computed as one product from one copy of their weights."""

    def __init__(self, layers: list[nn.Linear], dtype: torch.dtype):
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]

        weights = [effective_weight(layer).to(dtype) for layer in layers]
        self.weight = torch.cat(weights)
        if _can_reorder(self.weight):
            self.weight = _mkldnn._reorder_linear_weight(self.weight, None)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases).to(dtype) if biases else None

        self._input = None
        self._outputs = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of all layers, ``[..., sum(out_features)]``."""
        x = x.to(self.weight.dtype)
        if self.weight.is_mkldnn:
            return _mkldnn._linear_pointwise(
                x,
                self.weight,
                self.bias,
                "none",  # no operation after it
                [],
                "",
            )
        return nn.functional.linear(x, self.weight, self.bias)

    def output_of(self, number: int, x: Tensor) -> Tensor:
        """Output of layer ``number``. The first call with a tensor computes all outputs."""
        if x is not self._input:
            self._outputs = self(x).split(self.sizes, dim=-1)
            self._input = x
        output = self._outputs[number]
        # Models call the layers in order, so after the last layer the outputs are not needed.
        if number == len(self.layers) - 1:
            self._input = None
            self._outputs = ()
        return output


class CopiedLinear(nn.Module):
    """Module that replaces an ``nn.Linear`` in the model. It has the same parameters, but computes
    from the copy of the weight."""

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
"""The copy of each linear layer's weight. Layers with the same input are in one fused copy."""


@contextmanager
def _copies_in(model: nn.Module, copies: Copies) -> Iterator[None]:
    """Inside the block, layers of the model with a copy in ``copies`` compute from the copy."""
    layers = {name: module for name, module in model.named_modules() if module in copies}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, CopiedLinear(layer, copies[layer]))
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def copied_weights(model: nn.Module, precision: str) -> AbstractContextManager[None]:
    """Inside the block, linear layers compute from copies of their weights in the dtype of
    ``precision``. The weights must not change inside the block, because the copies would not
    follow."""
    modules = list(model.modules())
    return _copies_in(model, _make_copies(modules, precision))


def _make_copies(modules: list[nn.Module], precision: str) -> Copies:
    """Copy the weights of the linear layers among these modules, where a copy is faster."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layers = []
    inside_adapted = set()
    for module in modules:
        if module not in inside_adapted and _is_worth_copying(module, dtype):
            layers.append(module)
        # The copy of a layer with an adapter includes the base layer and the adapter's matrices.
        # These are linear layers, too, but need no further copies.
        if adapted_base(module):
            inside_adapted.update(module.modules())

    copies = {}
    for parent in modules:
        for names in SAME_INPUT:
            siblings = [getattr(parent, name, None) for name in names]
            if all(layer in layers for layer in siblings):
                fused = FusedLinear(siblings, dtype)
                copies |= dict.fromkeys(siblings, fused)
    for layer in layers:
        if layer not in copies:
            copies[layer] = FusedLinear([layer], dtype)
    return copies


class GatheredWeights:
    """The weights of a rollout under FSDP, gathered layer by layer into an unsharded rollout model.

    The rollout model has no weights between rollouts. While a layer is gathered in fp32, its
    linear layers are copied, and its other parameters (embedding, norms) are cloned. After that no
    decode step communicates, so ranks may decode different numbers of steps.
    """

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        rollout_model: nn.Module,
    ):
        """
        Args:
            root: the root module of FSDP. Its group has the parameters outside of decoder layers.
            model: the sharded model.
            rollout_model: a model of the same modules with all parameters on the meta device.
        """
        self.root = root
        self.rollout_model = rollout_model
        pairs = zip(rollout_model.modules(), model.modules(), strict=True)
        self.sources = dict(pairs)
        """The sharded model's module for each module of the rollout model."""
        self.meta_parameters = {}
        """Parameters of each module of the rollout model between rollouts, on the meta device."""
        for module in self.sources:
            self.meta_parameters[module] = dict(module._parameters)

    @contextmanager
    def filled(
        self,
        precision: str,
        *,
        fast_decode: bool,
    ) -> Iterator[None]:
        """Inside the block, the rollout model has the weights that the sharded model has on entry.

        All ranks enter the block together, because entering gathers the weights.
        """
        layers = decoder_layers(self.rollout_model)
        layer_of = {}
        for layer in layers:
            layer_of |= dict.fromkeys(layer.modules(), layer)

        copies = {}
        try:
            for layer in [*layers, None]:  # None stands for the modules outside any layer
                modules = [module for module in self.sources if layer_of.get(module) is layer]
                source = self.root
                if layer is not None:
                    source = self.sources[layer]
                # Only one layer at a time is in memory in fp32.
                with torch.no_grad(), unsharded(source):
                    for module in modules:
                        module._parameters.update(self.sources[module]._parameters)
                    if fast_decode:
                        copies |= _make_copies(modules, precision)
                    self._keep_uncopied(modules, copies)
            with _copies_in(self.rollout_model, copies):
                yield
        finally:
            for module, parameters in self.meta_parameters.items():
                module._parameters.update(parameters)

    def _keep_uncopied(self, modules: list[nn.Module], copies: Copies) -> None:
        """Clone the gathered parameters of which there is no copy, and release all other gathered
        parameters."""
        # A copied layer with an adapter has its base layer and the adapter's matrices as modules.
        copied = set()
        for linear in copies:
            copied.update(linear.modules())
        clones = {}  # a weight that is tied, so in two modules, is cloned once
        for module in modules:
            parameters = self.meta_parameters[module]
            if module not in copied:
                parameters = copy.deepcopy(module._parameters, clones)
            module._parameters.update(parameters)


def _is_worth_copying(module: nn.Module, dtype: torch.dtype) -> bool:
    """True for a linear layer that is faster with a copy: in bf16, or if oneDNN can reorder it.

    A layer with an adapter is always faster with a copy, since three products become one. A layer
    with hooks, or with a ``forward`` set on the instance, must not be copied.
    """
    linear = adapted_base(module) or module
    if type(linear) not in (nn.Linear, BF16Linear):
        return False
    for layer in (module, linear):
        has_hooks = layer._forward_hooks or layer._forward_pre_hooks
        if has_hooks or "forward" in vars(layer):
            return False
    # In bf16 the copy saves a cast of the fp32 weight at every token.
    if dtype == torch.bfloat16 or linear is not module:
        return True
    return _can_reorder(linear.weight)


def _can_reorder(weight: Tensor) -> bool:
    """True if oneDNN can multiply with a reordered copy of this weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or _mkldnn._is_mkldnn_bf16_supported()

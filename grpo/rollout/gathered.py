"""The weights of a rollout when every rank holds a share of the model: gathered once, layer by layer, into a model of
this rank's own.

That model has the modules of the divided one and no weights between rollouts. While a layer is gathered in fp32, the
copies that decode steps read are made from it (:mod:`grpo.rollout.weights`: bf16 under autocast), and what is not
copied (embedding, norms) is cloned in fp32. After that no decode step communicates, so that ranks may decode different
numbers of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo.distributed import World, gathered
from grpo.model import decoder_layers
from grpo.rollout.weights import Copies, copies_of, in_place_of


@dataclass(frozen=True)
class _Part:
    """A layer, or all that is in no layer."""

    source: nn.Module
    """The divided module whose weights are gathered together."""
    pairs: list[tuple[nn.Module, nn.Module]]
    """Each module of the own model and the module of the divided one that has its weights."""


class GatheredWeights:
    def __init__(self, root: nn.Module, model: PreTrainedModel, own: PreTrainedModel, world: World):
        """
        Args:
            root: the divided module whose root group holds what is in no layer of ``model``.
            model: the divided model.
            own: a model of the same modules with all parameters on the meta device.
        """
        self.own, self.world = own, world
        layers, own_layers = decoder_layers(model), decoder_layers(own)
        in_layers = {module for layer in layers for module in layer.modules()}
        both = zip(own.modules(), model.modules(), strict=True)
        rest = [(mine, theirs) for mine, theirs in both if theirs not in in_layers]
        self.parts = [
            _Part(theirs, list(zip(mine.modules(), theirs.modules(), strict=True)))
            for mine, theirs in zip(own_layers, layers, strict=True)
        ]
        self.parts.append(_Part(root, rest))

    @contextlib.contextmanager
    def copied(self, precision: str, *, fast_decode: bool) -> Iterator[None]:
        """Inside the block the own model has the weights of this moment. All ranks enter it together."""
        copies: Copies = {}
        try:
            with torch.no_grad(), self.world.collective():
                for part in self.parts:
                    with gathered(part.source):
                        copies |= self._take(part, precision, fast_decode)
            with in_place_of(self.own, copies):
                yield
        finally:
            for part in self.parts:
                for mine, _ in part.pairs:
                    _drop(mine)

    def _take(self, part: _Part, precision: str, fast_decode: bool) -> Copies:
        """Copy and clone the weights of a part while they are gathered."""
        for mine, theirs in part.pairs:
            mine._parameters.update(theirs._parameters)
        copies = copies_of([mine for mine, _ in part.pairs], precision) if fast_decode else {}
        cloned: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
        copied = {inner for mine in copies for inner in mine.modules()}  # of an adapted layer also base and matrices
        for mine, _ in part.pairs:
            if mine in copied:
                _drop(mine)
                continue
            for name, weight in mine._parameters.items():
                if weight is not None and weight not in cloned:
                    cloned[weight] = nn.Parameter(weight.detach().clone(), requires_grad=False)
                mine._parameters[name] = weight if weight is None else cloned[weight]
        return copies


def _drop(module: nn.Module) -> None:
    """Free the module's own weights."""
    for name, weight in module._parameters.items():
        if weight is not None and not weight.is_meta:
            module._parameters[name] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)

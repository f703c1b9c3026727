"""The weights of a rollout when every rank holds a share of the model: gathered once, layer by layer, into a model of
this rank's own.

That model has no weights between rollouts. While a layer is gathered in fp32, the copies that decode steps read are
made from it (:mod:`grpo.rollout.weights`), and what is not copied (embedding, norms) is cloned. After that no decode
step communicates, so that ranks may decode different numbers of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo.distributed import gathered
from grpo.model import decoder_layers
from grpo.rollout.weights import Copies, copies_of, in_place_of

Pairs = list[tuple[nn.Module, nn.Module]]
"""Modules of this rank's own model, each with the module of the divided one that has its weights."""


class GatheredWeights:
    def __init__(self, root: nn.Module, model: PreTrainedModel, own: PreTrainedModel):
        """
        Args:
            root: the divided module whose root group holds what is in no layer of ``model``.
            model: the divided model.
            own: a model of the same modules with all parameters on the meta device.
        """
        self.own = own
        self.parts: list[tuple[nn.Module, Pairs]] = []
        """Each layer of the divided model, then the root for all that is in none, with the modules of both models."""
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
        cloned: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
        copied = {inner for mine in copies for inner in mine.modules()}  # of an adapted layer also base and matrices
        for mine, _ in pairs:
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

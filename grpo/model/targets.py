"""The layers that ``lora.target_modules`` names, looked up before peft puts adapters into them."""

from __future__ import annotations

import re

from torch import nn
from transformers.pytorch_utils import Conv1D


def check_targets(model: nn.Module, targets: str | list[str], rank: int) -> None:
    """ValueError unless each name, or the regular expression, means linear layers of the model, and the rank is possible in each.

    peft only notices if none of the names does, so a misspelled one would leave its layers untrained. A change of a layer cannot have a
    rank above the layer's smaller dimension.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}
    without_head = {name for name in linear if modules[name] is not model.get_output_embeddings()}
    chosen, problem = (sorted(without_head), None) if targets == "all-linear" else _chosen(targets, modules, linear)
    if problem:
        ends = {name.rpartition(".")[2] for name in without_head}
        names = ", ".join(sorted(ends))
        raise ValueError(f"lora.target_modules={targets}: {problem}; use all-linear or a list of {names}")
    shapes = {name: tuple(modules[name].weight.shape) for name in chosen}
    smallest = min(shapes, key=lambda name: min(shapes[name]), default=None)
    if smallest is not None and rank > (most := min(shapes[smallest])):
        size = " x ".join(map(str, shapes[smallest]))
        raise ValueError(
            f"lora.rank={rank} is above {most}, the smallest dimension of the layers with adapters ({smallest}, {size}): use at most {most}"
        )


def _chosen(targets: str | list[str], modules: dict[str, nn.Module], linear: set[str]) -> tuple[list[str], str | None]:
    """The names of the layers that are meant, and what is wrong with ``targets`` (None: nothing)."""
    if isinstance(targets, str):
        try:
            chosen = [name for name in modules if re.fullmatch(targets, name)]
        except re.error as error:
            return [], f"it is no regular expression ({error})"
        if not chosen:
            return [], "no layer has such a name"
    else:
        ends = {target: [name for name in modules if f".{name}".endswith(f".{target}")] for target in targets}
        if absent := [target for target, names in ends.items() if not names]:
            return [], f"no layer has the name {', '.join(absent)}"
        chosen = [name for names in ends.values() for name in names]
    other = next((name for name in chosen if name not in linear), None)
    return chosen, other and f"{other} is {type(modules[other]).__name__} and no linear layer"

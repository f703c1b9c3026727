"""The layers that ``lora.target_modules`` names."""

from __future__ import annotations

import re

from torch import nn
from transformers.pytorch_utils import Conv1D


def check_targets(model: nn.Module, targets: str | list[str], asked: str) -> None:
    """ValueError, which begins with ``asked``, unless each name, or the regular expression, means linear layers of the model.

    peft only notices if none of the names does, so a misspelled one would leave its layers untrained.
    """
    if targets == "all-linear":
        return
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}
    problem = _problem(targets, modules, linear)
    if problem:
        ends = {name.rpartition(".")[2] for name in linear if modules[name] is not model.get_output_embeddings()}
        raise ValueError(f"{asked}: {problem}; use all-linear or a list of {', '.join(sorted(ends))}")


def _problem(targets: str | list[str], modules: dict[str, nn.Module], linear: set[str]) -> str | None:
    if isinstance(targets, str):
        try:
            chosen = [name for name in modules if re.fullmatch(targets, name)]
        except re.error as error:
            return f"it is no regular expression ({error})"
        if not chosen:
            return "no layer has such a name"
    else:
        ends = {target: [name for name in modules if f".{name}".endswith(f".{target}")] for target in targets}
        if absent := [target for target, names in ends.items() if not names]:
            return f"no layer has the name {', '.join(absent)}"
        chosen = [name for names in ends.values() for name in names]
    other = next((name for name in chosen if name not in linear), None)
    return other and f"{other} is {type(modules[other]).__name__} and no linear layer"

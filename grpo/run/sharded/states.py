"""The optimizer's averages and a moving reference in a checkpoint: of whole models in single files, of divided ones in files of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo.distributed import World, divide_like, load_divided, names_of_divided, save_divided

DIVIDED = "divided"
"""The folder in ``trainer/`` with the files of all ranks."""


def save_states(
    trainer: Path, world: World, model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None
) -> None:
    """Write averages and reference into ``trainer/divided``. All ranks call it; OSError on all if a rank cannot write."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {
        f"optimizer/{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    if reference is not None:
        tensors |= _reference_tensors(reference)
    save_divided(tensors, trainer / DIVIDED, world)


def read_optimizer_states(
    trainer: Path, saved: dict[int, dict[str, Any]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Any]]:
    """The optimizer's state by number of the parameter, as ``load_state_dict`` takes it, divided as the parameters are.

    ``saved``: the states of the single file, used where there are no divided ones.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not (trainer / DIVIDED).is_dir():
        divided = {
            number: {
                key: divide_like(value, p) if torch.is_tensor(value) and value.shape == p.shape else value
                for key, value in saved[number].items()
            }
            for number, p in enumerate(parameters)
            if number in saved
        }
        return divided | {number: state for number, state in saved.items() if number not in divided}
    names, known = {p: name for name, p in model.named_parameters()}, names_of_divided(trainer / DIVIDED)
    tensors, states = {}, {}
    for number, p in enumerate(parameters):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if (name := f"optimizer/{names[p]}/{key}") in known:
                tensors[name] = torch.zeros(()) if key == "step" else torch.zeros_like(p, requires_grad=False)
                states.setdefault(number, {})[key] = tensors[name]
    if tensors:
        load_divided(tensors, trainer / DIVIDED)
    return states


def read_reference(trainer: Path, reference: nn.Module, device: torch.device) -> None:
    """Restore a reference that moves, in place; it stays as it is if the checkpoint has none."""
    if (trainer / "reference.pt").exists():
        saved = torch.load(trainer / "reference.pt", map_location=device, weights_only=True)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(divide_like(saved[name], parameter))
    elif (trainer / DIVIDED).is_dir():
        tensors = _reference_tensors(reference)
        if tensors.keys() <= names_of_divided(trainer / DIVIDED):
            load_divided(tensors, trainer / DIVIDED)


def _reference_tensors(reference: nn.Module) -> dict[str, torch.Tensor]:
    return {f"reference/{name}": parameter.detach() for name, parameter in reference.named_parameters()}

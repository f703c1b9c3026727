"""Checkpoints on disk: saved atomically, verified, listed, restored.

A checkpoint is a Hugging Face folder (``from_pretrained`` loads it), or a peft folder, with ``trainer/`` beside the
weights: ``state.json``, and the tensors of the optimizer and of a moving reference in the format of
``torch.distributed.checkpoint``. It is the same for DDP and FSDP, and any number of ranks continues it. The position in
the data, the learning rate and all randomness follow from (seed, step).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo.distributed import (
    World,
    is_sharded,
    load_tensors,
    optimizer_tensors,
    save_tensors,
    saved_names,
    share,
    whole_trained_weights,
)
from grpo.model import Policy, save_weights
from grpo.system import publish

MANIFEST, STATES = "manifest.json", "states"
"""The file of digests; and the folder in ``trainer/`` with the tensors, a file of each rank under FSDP."""
ALONE = World(0, 1, 0, torch.device("cpu"))
"""A process that saves without other ranks."""
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Trained:
    """All tensors that change with every update."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    reference: dict[str, torch.Tensor]
    """The weights of a reference that changes during training, by name; else empty."""

    @property
    def is_sharded(self) -> bool:
        return any(map(is_sharded, self.policy.model.modules()))

    def weights(self) -> dict[str, torch.Tensor]:
        """The state dict to write; under FSDP gathered in rank 0's host memory, by all ranks together."""
        return whole_trained_weights(self.policy.trained, self.policy.unreached.values())

    def states(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors and the reference's, under FSDP this rank's shares."""
        names = {parameter: name for name, parameter in self.policy.model.named_parameters()}
        found = {f"reference/{name}": tensor.detach() for name, tensor in self.reference.items()}
        for parameter, values in self.optimizer.state.items():
            found |= {f"optimizer/{names[parameter]}/{key}": value for key, value in values.items()}
        return found

    def check_finite(self, step: int) -> None:
        """ValueError if a weight that is trained is NaN or infinite: no run can continue from it."""
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad and not torch.isfinite(share(parameter)).all():
                raise ValueError(
                    f"{name} holds values that are not finite: no checkpoint is saved at step {step}; lower "
                    "optim.learning_rate"
                )


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    *,
    trained: Trained,
    world: World = ALONE,
    state: dict[str, Any] | None = None,
    keep: int = 2,
    best_step: int | None = None,
) -> Path:
    """Write ``checkpoint-<step>/``, delete all but the ``keep`` newest up to this step; returns the folder.

    The files go into a hidden folder, the manifest is written last, all is synced to disk, and then the folder is
    renamed: a checkpoint with its final name is complete, whenever the process is killed.

    Args:
        world: all ranks call it together (FSDP), and raise errors together; ``ALONE``: this process by itself.
        state: JSON-serialisable facts of the run (progress, wandb id, resolved config, ...).
        best_step: the checkpoint of this step is kept whatever its age.
    """
    partial, final = Path(output_dir, f".partial-checkpoint-{step}"), Path(output_dir, f"checkpoint-{step}")
    with world.fail_together():
        trained.check_finite(step)
    weights, states = trained.weights(), trained.states()
    with world.fail_together():
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "trainer").mkdir(parents=True)
            save_weights(trained.policy.trained, weights, partial)
            trained.policy.tokenizer.save_pretrained(partial)
    save_tensors(states, partial / "trainer" / STATES, is_alone=world.is_alone)
    with world.fail_together():
        if world.is_main:  # the manifest lists the files of all ranks
            state_json = json.dumps({"step": step, **(state or {})}, indent=1)
            (partial / "trainer" / "state.json").write_text(state_json, encoding="utf-8")
            files = {str(p.relative_to(partial)): _digest(p) for p in sorted(partial.rglob("*")) if p.is_file()}
            (partial / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
            publish(partial, final)
            # Checkpoints of later steps are broken, or of a run that was continued from before: they do not count.
            for old_step, old in [(s, folder) for s, folder in list_checkpoints(output_dir) if s <= step][keep:]:
                if old_step != best_step:
                    shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(output_dir: str | Path) -> list[tuple[int, Path]]:
    """``(step, folder)``, newest first."""
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(((int(_NAME.fullmatch(p.name)[1]), p) for p in folders), reverse=True)


def recover(output_dir: str | Path) -> None:
    """After a kill: give a complete checkpoint its final name, and delete unfinished ones."""
    shutil.rmtree(Path(output_dir, ".trial-save"), ignore_errors=True)
    for partial in Path(output_dir).glob(".partial-checkpoint-*"):
        if problem(partial):
            shutil.rmtree(partial, ignore_errors=True)
        else:
            publish(partial, partial.with_name(partial.name.removeprefix(".partial-")))


def find_newest_valid(output_dir: str | Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint (None if there is none), and a warning about each newer one that is not valid."""
    warnings = []
    for _, folder in list_checkpoints(output_dir):
        if (broken := problem(folder)) is None:
            return folder, warnings
        warnings.append(f"skipping {broken}")
    return None, warnings


def problem(folder: Path) -> str | None:
    """The first difference between a checkpoint and its manifest; None for a valid checkpoint."""
    name = MANIFEST
    try:
        with open(folder / MANIFEST, "rb") as file:
            manifest = json.load(file)
        for name, saved in manifest["files"].items():
            if _digest(folder / name) != saved:
                return f"{folder}: {name} is not what was saved"
    except Exception as error:  # it may hold anything
        return f"{folder}: {name} cannot be read ({type(error).__name__}: {error})"
    return None


def read_state(folder: str | Path) -> dict[str, Any]:
    """The ``state`` passed to :func:`save_checkpoint`, with ``step``, of a valid checkpoint."""
    return json.loads(Path(folder, "trainer", "state.json").read_text(encoding="utf-8"))


def restore(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, reference: dict[str, torch.Tensor]
) -> None:
    """Load the optimizer's state and a reference that changes during training; each rank reads its own shares.

    A reference that the checkpoint lacks stays as it is; ValueError if the model lacks a weight of the optimizer's.
    ``load_policy(folder)`` loads the model.
    """
    saved = saved_names(folder / "trainer" / STATES)
    wanted = {f"reference/{name}": tensor.detach() for name, tensor in reference.items()}
    wanted |= {f"optimizer/{name}": tensor for name, tensor in optimizer_tensors(model, optimizer).items()}
    for name, parameter in model.named_parameters():
        if f"optimizer/{name}/step" not in saved:  # of an expert that no token was sent to, for example
            optimizer.state.pop(parameter, None)
    if strange := sorted(name for name in saved - wanted.keys() if name.startswith("optimizer/")):
        raise ValueError(f"its {strange[0]} is of no weight that the model trains")
    load_tensors({name: tensor for name, tensor in wanted.items() if name in saved}, folder / "trainer" / STATES)


def _digest(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

"""Checkpoints on disk: saved atomically, verified, listed, restored.

A checkpoint is a Hugging Face folder (``from_pretrained`` loads it), or a peft folder, with ``trainer/`` beside the
weights: ``state.json``, and the tensors of the optimizer and of a moving reference in the format of
``torch.distributed.checkpoint``. It is the same for DDP and FSDP, and any number of ranks continues it. The position in
the data, the learning rate and all randomness follow from (seed, step).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
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
from grpo.system import UserError, first_line, open_regular, publish

MANIFEST, STATES = "manifest.json", "states"
"""The file of digests; and the folder in ``trainer/`` with the tensors, a file of each rank under FSDP."""
_NAME = re.compile(r"checkpoint-(\d+)")
FULL_BYTES = 2**24
"""A disk with less space left than this is called full in messages."""


class BrokenCheckpoint(ValueError):
    """The checkpoint is incomplete or was altered."""


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
        return whole_trained_weights(self.policy.trained)

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
                problem = f"{name} holds values that are not finite: no checkpoint is saved at step {step}"
                raise ValueError(f"{problem}; lower optim.learning_rate")


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    *,
    trained: Trained,
    world: World | None = None,
    state: dict[str, Any] | None = None,
    keep: int = 2,
    best_step: int | None = None,
) -> Path:
    """Write ``checkpoint-<step>/``, delete all but the ``keep`` newest up to this step; returns the folder.

    The files go into a hidden folder first and are synced to disk, the manifest is written last, and then the folder is
    renamed: a checkpoint with its final name is complete, whenever the process is killed.

    Args:
        world: all ranks call it together (FSDP), and raise errors together; None: this process alone.
        state: JSON-serialisable facts of the run (progress, wandb id, resolved config, ...).
        best_step: the checkpoint of this step is kept whatever its age.

    Raises:
        UserError: if the disk is full or cannot be written.
        ValueError: if a weight is NaN or infinite. Nothing is written or deleted.
    """
    output_dir, is_main = Path(output_dir), world is None or world.is_main
    partial, final = output_dir / f".partial-checkpoint-{step}", output_dir / f"checkpoint-{step}"
    together = contextlib.nullcontext if world is None else world.fail_together
    with together():
        trained.check_finite(step)
    weights, states = trained.weights(), trained.states()
    with together(), _disk_errors(output_dir, step):
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "trainer").mkdir(parents=True)
            save_weights(trained.policy.trained, weights, partial)
            trained.policy.tokenizer.save_pretrained(partial)
    with _disk_errors(output_dir, step):
        save_tensors(states, partial / "trainer" / STATES, world)
    with together(), _disk_errors(output_dir, step):
        if is_main:  # the manifest lists the files of all ranks
            _complete(partial, final, {"step": step, **(state or {})})
            # Checkpoints of later steps are broken, or of a run that was continued from before: they do not count.
            for old_step, old in [(s, folder) for s, folder in list_checkpoints(output_dir) if s <= step][keep:]:
                if old_step != best_step:
                    shutil.rmtree(old, ignore_errors=True)
    return final


@contextlib.contextmanager
def _disk_errors(output_dir: Path, step: int) -> Iterator[None]:
    """Turn a save's errors, which each library words in its own way, into one line, also on a full disk."""
    try:
        yield
    except Exception as error:
        existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
        full = "the disk is full: " * (shutil.disk_usage(existing).free < FULL_BYTES)
        reason = f"{full}{type(error).__name__}: {first_line(error)}"
        raise UserError(f"checkpoint at step {step} could not be saved in {output_dir}: {reason}") from error


def _complete(partial: Path, final: Path, state: dict[str, Any]) -> None:
    """Complete the hidden folder by state and manifest, and give it its final name."""
    (partial / "trainer" / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    files = {str(path.relative_to(partial)): _digest(path) for path in sorted(partial.rglob("*")) if path.is_file()}
    (partial / MANIFEST).write_text(json.dumps({"step": state["step"], "files": files}, indent=1), encoding="utf-8")
    replaced = final.with_name(f".replaced-{final.name}")
    if final.exists():
        os.rename(final, replaced)
    publish(partial, final)
    shutil.rmtree(replaced, ignore_errors=True)


def list_checkpoints(output_dir: str | Path) -> list[tuple[int, Path]]:
    """``(step, folder)``, newest first."""
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(((int(_NAME.fullmatch(p.name)[1]), p) for p in folders), reverse=True)


def recover(output_dir: str | Path) -> None:
    """Delete unfinished checkpoints; restore one that was about to be replaced by another of its step."""
    for unfinished in [*Path(output_dir).glob(".partial-checkpoint-*"), *Path(output_dir).glob(".rehearsal")]:
        shutil.rmtree(unfinished, ignore_errors=True)
    for replaced in Path(output_dir).glob(".replaced-checkpoint-*"):
        final = replaced.with_name(replaced.name.removeprefix(".replaced-"))
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(replaced, final)


def find_newest_valid(output_dir: str | Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint (None if there is none), and a warning about each newer one that is not valid."""
    warnings = []
    for _, folder in list_checkpoints(output_dir):
        try:
            verify(folder)
            return folder, warnings
        except BrokenCheckpoint as broken:
            warnings.append(f"skipping {broken}")
    return None, warnings


def verify(folder: str | Path) -> dict[str, Any]:
    """Compare a checkpoint with its manifest, which is returned; BrokenCheckpoint names the first difference."""
    folder, name = Path(folder), MANIFEST
    try:
        with open_regular(folder / MANIFEST) as file:
            manifest = json.load(file)
        for name, facts in manifest["files"].items():
            if (found := _digest(folder / name)) != facts:
                problem = f"{name} is not what was saved ({found['bytes']} bytes, {facts['bytes']} expected)"
                raise BrokenCheckpoint(f"{folder}: {problem}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # it may hold anything
        if isinstance(error, BrokenCheckpoint):
            raise
        raise BrokenCheckpoint(f"{folder}: {name} cannot be read ({type(error).__name__}: {error})") from None
    return manifest


def read_state(folder: str | Path) -> dict[str, Any]:
    """The ``state`` given to :func:`save_checkpoint`, with ``step``, of a checkpoint that was verified."""
    return json.loads(Path(folder, "trainer", "state.json").read_text(encoding="utf-8"))


def restore(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, reference: dict[str, torch.Tensor]
) -> None:
    """Load the optimizer's state and a reference that changes during training; each rank reads its own shares.

    A state that the checkpoint lacks stays as it is; ValueError if it has one of a weight that the model lacks.
    ``load_policy(folder)`` loads the model.
    """
    saved = saved_names(folder / "trainer" / STATES)
    wanted = {f"reference/{name}": tensor.detach() for name, tensor in reference.items()}
    if any(name.startswith("optimizer/") for name in saved):
        wanted |= {f"optimizer/{name}": tensor for name, tensor in optimizer_tensors(model, optimizer).items()}
        for name, parameter in model.named_parameters():
            if f"optimizer/{name}/step" not in saved:  # of an expert that no token was sent to, for example
                optimizer.state.pop(parameter, None)
    if strange := sorted(name for name in saved - wanted.keys() if name.startswith("optimizer/")):
        raise ValueError(f"its {strange[0]} is of no weight that the model trains")
    if wanted := {name: tensor for name, tensor in wanted.items() if name in saved}:
        load_tensors(wanted, folder / "trainer" / STATES)


def _digest(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

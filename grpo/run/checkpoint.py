"""Checkpoints on disk: saved atomically, verified, listed, restored.

A checkpoint is a Hugging Face folder (``from_pretrained`` loads it) with ``trainer/`` beside the weights. The position in the data
and all randomness follow from (seed, step), so neither is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from grpo.model import save_weights
from grpo.run.sharded.states import read_optimizer_states, read_reference
from grpo.system import open_regular, sync

MANIFEST = "manifest.json"
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions of reading a JSON file that may contain anything."""
_NAME = re.compile(r"checkpoint-(\d+)")


class BrokenCheckpoint(ValueError):
    """The checkpoint is incomplete or was altered."""


@dataclass(frozen=True)
class Tensors:
    """The tensors that change with every update: state dicts that share the live tensors, or copies of them."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    reference: dict[str, torch.Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any, schedule: Any, reference: nn.Module | None = None) -> Tensors:
        reference_state = None if reference is None else reference.state_dict()
        return cls(model.state_dict(), optimizer.state_dict(), schedule.state_dict(), reference_state)

    def on_host(self) -> Tensors:
        """A copy in host memory, which training does not change; tied weights stay tied."""
        copies: dict[tuple, torch.Tensor] = {}

        def copy(thing: Any) -> Any:
            if isinstance(thing, torch.Tensor):
                key = (thing.data_ptr(), thing.shape, thing.stride(), thing.dtype)
                if key not in copies or not thing.numel():
                    copies[key] = thing.detach().to("cpu", copy=True)
                return copies[key]
            if isinstance(thing, dict):
                return type(thing)((name, copy(item)) for name, item in thing.items())
            return type(thing)(map(copy, thing)) if isinstance(thing, (list, tuple)) else thing

        return Tensors(copy(self.model), copy(self.optimizer), copy(self.schedule), copy(self.reference))


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    *,
    model: nn.Module,
    tokenizer: Any,
    optimizer: Any,
    schedule: Any,
    reference: nn.Module | None = None,
    state: dict[str, Any] | None = None,
    keep: int = 2,
    best_step: int | None = None,
    tensors: Tensors | None = None,
    merge: Callable[[Path, Path], None] | None = None,
) -> Path:
    """Write ``checkpoint-<step>/``, then delete all but the ``keep`` newest checkpoints up to this step; returns the folder.

    The files go into a hidden folder first and are synced to disk, the manifest is written last, and then the folder is renamed: a
    checkpoint with its final name is complete, whenever the process is killed.

    Args:
        model: the model, or the adapter that is trained in its place.
        reference: only if it changes during training (``ref_sync_steps``); otherwise it is the starting model.
        state: JSON-serialisable facts of the run (progress, wandb id, resolved config, ...).
        best_step: the checkpoint of this step is kept whatever its age.
        tensors: a copy made earlier, written instead of the current tensors of ``model``, ``optimizer``, ...
        merge: writes the whole model of an adapter folder, the first argument, into another folder (``checkpoint.merge``).

    Raises:
        OSError: if the disk is full or cannot be written.
        ValueError: if a weight is NaN or infinite: no run can continue from it. Nothing is written or deleted.
    """
    tensors = tensors or Tensors.of(model, optimizer, schedule, reference)
    for name, _ in model.named_parameters():
        if not torch.isfinite(tensors.model[name]).all():
            problem = f"{name} holds values that are not finite: no checkpoint is saved at step {step}"
            raise ValueError(f"{problem}; lower optim.learning_rate")
    partial = begin(partial_folder(output_dir, step))
    try:
        save_weights(model, tensors.model, partial)
        tokenizer.save_pretrained(partial)
        if merge is not None:
            merge(partial, partial / "merged")
        save_trained({"optimizer": tensors.optimizer, "schedule": tensors.schedule}, partial)
        if tensors.reference is not None:
            torch.save(tensors.reference, partial / "trainer" / "reference.pt")
    except (SafetensorError, RuntimeError) as error:  # these libraries report a full disk in this way
        raise OSError(f"{type(error).__name__}: {error}") from error
    return publish(partial, Path(output_dir), step, state=state, keep=keep, best_step=best_step)


def partial_folder(output_dir: str | Path, step: int) -> Path:
    """The hidden folder that a checkpoint is written into."""
    return Path(output_dir) / f".partial-checkpoint-{step}"


def begin(partial: Path) -> Path:
    """Create the hidden folder, empty, with ``trainer/``; OSError if that fails."""
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "trainer").mkdir(parents=True)
    return partial


def save_trained(states: dict[str, Any], partial: Path) -> None:
    """Write ``optimizer.pt``: the state dicts of optimizer and schedule."""
    torch.save(_plain(states), partial / "trainer" / "optimizer.pt")


def publish(
    partial: Path, output_dir: Path, step: int, *, state: dict[str, Any] | None, keep: int, best_step: int | None
) -> Path:
    """Complete the hidden folder by state and manifest, give it its final name, delete old checkpoints; see :func:`save_checkpoint`."""
    final, trainer = output_dir / f"checkpoint-{step}", partial / "trainer"
    (trainer / "state.json").write_text(json.dumps({"step": step, **(state or {})}, indent=1), encoding="utf-8")
    files = {str(path.relative_to(partial)): _digest(path) for path in sorted(partial.rglob("*")) if path.is_file()}
    for name in files:
        sync(partial / name)
    (partial / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
    sync(partial / MANIFEST)
    for folder in sorted({(partial / name).parent for name in files}, reverse=True):
        sync(folder)
    replaced = output_dir / f".replaced-{final.name}"
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    sync(output_dir)
    shutil.rmtree(replaced, ignore_errors=True)
    # Checkpoints of later steps are broken or belong to a run that was continued from an earlier step; they do not count towards `keep`.
    for old_step, old in [(s, folder) for s, folder in list_checkpoints(output_dir) if s <= step][keep:]:
        if old_step != best_step:
            shutil.rmtree(old, ignore_errors=True)
    return final


def dry_run_save(output_dir: str | Path, **arguments: Any) -> None:
    """Save a checkpoint before the first step, verify it, delete it; raises what the save raises."""
    rehearsal = Path(output_dir) / ".rehearsal"
    try:
        verify(save_checkpoint(rehearsal, 0, **arguments))
    finally:
        shutil.rmtree(rehearsal, ignore_errors=True)


def list_checkpoints(output_dir: str | Path) -> list[tuple[int, Path]]:
    """``(step, folder)``, newest first."""
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(((int(_NAME.fullmatch(p.name)[1]), p) for p in folders), reverse=True)


def recover(output_dir: str | Path) -> None:
    """Delete unfinished checkpoints. Restore a checkpoint if the process was killed while replacing it by a new one of the same step."""
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
    """Check every file of a checkpoint against its manifest, which is returned; BrokenCheckpoint names the first that differs."""
    folder = Path(folder)
    try:
        with open_regular(folder / MANIFEST) as file:
            manifest = json.load(file)
        expected = {name: (facts["bytes"], facts["sha256"]) for name, facts in manifest["files"].items()}
    except DAMAGE as error:
        raise BrokenCheckpoint(f"{folder}: no readable {MANIFEST} ({type(error).__name__}: {error})") from None
    for name, (size, sha256) in expected.items():
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise BrokenCheckpoint(f"{folder}: {name} cannot be read ({error.strerror})") from None
        if (found["bytes"], found["sha256"]) != (size, sha256):
            raise BrokenCheckpoint(f"{folder}: {name} is not what was saved ({found['bytes']} bytes, {size} expected)")
    return manifest


def read_state(folder: str | Path) -> dict[str, Any]:
    """The ``state`` given to :func:`save_checkpoint`, with ``step``; BrokenCheckpoint if it is missing or damaged."""
    try:
        with open_regular(Path(folder) / "trainer" / "state.json") as file:
            state = json.load(file)
        if isinstance(state["step"], int) and isinstance(state.get("config", {}), dict):
            return state
        reason = "it is not the state of a run"
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {error}"
    raise BrokenCheckpoint(f"{folder}: trainer/state.json cannot be continued from ({reason})")


def restore(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Any,
    schedule: Any,
    reference: nn.Module | None = None,
    device: torch.device,
) -> None:
    """Load optimizer, schedule and a reference that changes during training; ``from_pretrained(folder)`` loads the model."""
    trainer = Path(folder) / "trainer"
    saved = torch.load(trainer / "optimizer.pt", map_location="cpu", weights_only=True)
    # Whether AdamW is fused follows from this run's device, not from that of the checkpoint. load_state_dict moves the averages to the
    # device of their weights, and there the update counters too if AdamW is fused; else they stay on the host.
    for group, own in zip(saved["optimizer"]["param_groups"], optimizer.param_groups, strict=False):
        group["fused"] = own.get("fused")
    saved["optimizer"]["state"] = read_optimizer_states(trainer, saved["optimizer"]["state"], model, optimizer)
    optimizer.load_state_dict(saved["optimizer"])
    if schedule is not None:
        schedule.load_state_dict(saved["schedule"])
    if reference is not None:
        read_reference(trainer, reference, device)


def save_config(model: nn.Module, folder: Path) -> None:
    """Write what a model folder has beside the weights: configurations, and the code of models that bring their own."""
    name, _ = next(iter(model.named_parameters()))
    with tempfile.TemporaryDirectory() as spare:  # transformers writes no configuration without weights
        save_weights(model, {name: torch.zeros(1)}, Path(spare))
        for path in Path(spare).iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)


def _plain(thing: Any) -> Any:
    """The same values in fresh containers, with equal strings as one object, so that the pickle's bytes depend on the values alone."""
    if isinstance(thing, dict):
        return {_plain(name): _plain(item) for name, item in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)(map(_plain, thing))
    return sys.intern(thing) if type(thing) is str else thing


def _digest(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

"""Checkpoints on disk: saved atomically, verified, listed, restored.

A checkpoint is a Hugging Face folder (``from_pretrained`` loads it), or a peft folder, with
``trainer/`` beside the weights: ``state.json``, and the tensors of the optimizer and of a moving
reference in the format of ``torch.distributed.checkpoint``. It is the same for DDP and FSDP, and
any number of ranks continues it. The position in the data, the learning rate and all randomness
follow from (seed, step)."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo.distributed import (
    World,
    full_trained_weights,
    load_tensors,
    local_shard,
    optimizer_tensors,
    save_tensors,
    saved_names,
)
from grpo.model import Policy, save_weights
from grpo.system import publish

MANIFEST = "manifest.json"
"""The file of digests."""
STATE = Path("trainer", "state.json")
STATES = Path("trainer", "states")
"""The folder with the tensors of optimizer and reference, a file of each rank under FSDP."""
SINGLE_PROCESS = World(0, 1, 0, torch.device("cpu"))
"""A process that saves without other ranks."""


@dataclass(frozen=True)
class TrainedTensors:
    """All tensors that change with every update."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    reference: dict[str, torch.Tensor]
    """The weights of a reference that changes during training, by name; else empty."""

    def states(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors and the reference's, under FSDP this rank's shares."""
        found = {}
        for name, tensor in self.reference.items():
            found[f"reference/{name}"] = tensor.detach()
        for name, parameter in self.policy.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer/{name}/{key}"] = value
        return found

    def check_finite(self, step: int) -> None:
        """ValueError if a weight that is trained is NaN or infinite: no run can continue from
        it."""
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad and not torch.isfinite(local_shard(parameter)).all():
                raise ValueError(
                    f"{name} holds values that are not finite: no checkpoint is saved at step {step}; lower "
                    "optim.learning_rate"
                )


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    *,
    trained: TrainedTensors,
    world: World = SINGLE_PROCESS,
    state: dict[str, Any],
    keep: int = 2,
    best_step: int | None = None,
) -> Path:
    """Write ``checkpoint-<step>/``, delete all but the ``keep`` newest up to this step; returns the
    folder.

    The files go into a hidden folder, the manifest is written last, all is synced to disk, and then
    the folder is renamed: a checkpoint with its final name is complete, whenever the process is
    killed.

    Args: world: all ranks call it together (FSDP), and raise errors together; ``SINGLE_PROCESS``:
        this process by itself. state: JSON-serialisable facts of the run (progress, wandb id,
        resolved config, ...). best_step: the checkpoint of this step is kept whatever its age.
    """
    final = Path(output_dir, f"checkpoint-{step}")
    partial = final.with_name(f".partial-{final.name}")
    # Under FSDP gathered in rank 0's host memory, by all ranks together.
    policy = trained.policy
    weights = full_trained_weights(policy.trained, policy.unreached.values())
    states = trained.states()
    with world.fail_together():
        trained.check_finite(step)
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "trainer").mkdir(parents=True)
            save_weights(policy.trained, weights, partial)
            policy.tokenizer.save_pretrained(partial)
    with world.fail_together():
        if not partial.is_dir():  # on another machine
            raise OSError(
                f"{partial} is missing here: with runtime.parallel=fsdp all machines must share output_dir"
            )
    save_tensors(states, partial / STATES, is_single_process=world.is_single_process)

    with world.fail_together():
        if world.is_main:
            (partial / STATE).write_text(json.dumps({"step": step} | state, indent=1))
            # The manifest lists the files of all ranks.
            digests = {}
            for file in sorted(partial.rglob("*")):
                if file.is_file():
                    digests[str(file.relative_to(partial))] = _digest(file)
            (partial / MANIFEST).write_text(json.dumps({"files": digests}))
            publish(partial, final)
            # Checkpoints of later steps are broken, or of a run that was continued from before:
            # they do not count.
            earlier = [saved for saved in list_checkpoints(final.parent) if saved[0] <= step]
            for old_step, old in earlier[keep:]:
                if old_step != best_step:
                    shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """``(step, folder)``, newest first."""
    found = []
    for folder in output_dir.glob("checkpoint-*"):
        step = folder.name.removeprefix("checkpoint-")
        if step.isdecimal() and folder.is_dir():
            found.append((int(step), folder))
    return sorted(found, reverse=True)


def recover(output_dir: Path) -> None:
    """After a kill: give a complete checkpoint its final name, and delete unfinished ones."""
    for partial in output_dir.glob(".partial-checkpoint-*"):
        if why_invalid(partial):
            shutil.rmtree(partial, ignore_errors=True)
        else:
            publish(partial, partial.with_name(partial.name.removeprefix(".partial-")))


def find_newest_valid(output_dir: Path) -> Path | None:
    """The newest valid checkpoint (None if there is none); prints a warning of each newer one."""
    for _, folder in list_checkpoints(output_dir):
        broken = why_invalid(folder)
        if broken is None:
            return folder
        print(f"warning: skipping {broken}")
    return None


def why_invalid(folder: Path) -> str | None:
    """The first difference between a checkpoint and its manifest; None for a valid checkpoint."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        wrong = [name for name, saved in files.items() if _digest(folder / name) != saved]
    except Exception as error:  # it may hold anything
        return f"{folder} cannot be read ({type(error).__name__}: {error})"
    return f"{folder}: {wrong[0]} is not what was saved" if wrong else None


def read_state(folder: Path) -> dict[str, Any]:
    """The ``state`` passed to :func:`save_checkpoint`, with ``step``, of a valid checkpoint."""
    return json.loads((folder / STATE).read_bytes())


def restore(folder: Path, trained: TrainedTensors) -> None:
    """Load the optimizer's state and a reference that changes during training; each rank reads its
    own shares.

    A reference that the checkpoint lacks stays as it is; ValueError if the model lacks a weight of
    the optimizer's. ``load_policy(folder)`` loads the model."""
    saved = saved_names(folder / STATES)
    model = trained.policy.model
    optimizer_tensors(model, trained.optimizer)  # makes those that an update would make
    for name, parameter in model.named_parameters():
        if (
            f"optimizer/{name}/step" not in saved
        ):  # of an expert that no token was sent to, for example
            trained.optimizer.state.pop(parameter, None)
    states = trained.states()
    for name in sorted(saved - states.keys()):
        if name.startswith("optimizer/"):
            raise ValueError(f"its {name} is of no weight that the model trains")
    wanted = {name: tensor for name, tensor in states.items() if name in saved}
    load_tensors(wanted, folder / STATES)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

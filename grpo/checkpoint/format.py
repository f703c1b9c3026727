"""Checkpoints on disk: how they are saved, verified, listed and restored.

A checkpoint is a Hugging Face folder (``from_pretrained`` loads it) or, with LoRA, a peft folder.
The subfolder ``trainer/`` holds ``state.json`` and the tensors of the optimizer. If the reference
model changes during training, its weights are there too. The tensors have the format of
``torch.distributed.checkpoint``: DDP and FSDP write the same format, and any number of ranks can
continue from it. The position in the data, the learning rate and all random numbers are not saved,
since they follow from the seed and the step.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo.distributed import (
    World,
    create_optimizer_state,
    full_trained_weights,
    load_tensors,
    local_shard,
    save_tensors,
    saved_names,
)
from grpo.model import Policy, save_weights
from grpo.system import publish

MANIFEST_FILE = "manifest.json"
"""JSON with the SHA-256 of all other files of a checkpoint."""
STATE_FILE = Path("trainer", "state.json")
"""Path in a checkpoint of a JSON file with the progress of the run, its configuration, and digests
of the files that it read."""
TENSORS_FOLDER = Path("trainer", "states")
"""Folder in a checkpoint with the tensors of the optimizer, and of a reference model that changes
during training. Under FSDP each rank writes a file with its shards."""
SINGLE_PROCESS = World(0, 1, torch.device("cpu"))
"""A :class:`World` with one rank, for a process that saves without other ranks."""


@dataclass(frozen=True)
class TrainedTensors:
    """Policy, optimizer and reference model, whose tensors a checkpoint saves."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    reference: dict[str, torch.Tensor]
    """Weights of the reference model by name, if they change during training; else empty."""

    def optimizer_and_reference(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the optimizer and of the reference by name, not copies of them.
        Tensors that FSDP has sharded are DTensors."""
        tensors = {}
        for name, tensor in self.reference.items():
            tensors[f"reference/{name}"] = tensor.detach()
        # The state dict of an optimizer numbers the parameters, in an order that may change. So the
        # names of parameters are the keys here.
        for name, parameter in self.policy.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = value
        return tensors

    def check_finite(self, step: int) -> None:
        """Raise a ValueError if a trained weight on this rank is NaN or infinite. A run could not
        continue with this weight."""
        for name, parameter in self.policy.model.named_parameters():
            # Each rank checks its local shards. save_checkpoint() raises the error on all ranks.
            if parameter.requires_grad and not torch.isfinite(local_shard(parameter)).all():
                raise ValueError(
                    f"{name} holds values that are not finite: "
                    f"no checkpoint is saved at step {step}; lower optim.learning_rate"
                )


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    *,
    trained: TrainedTensors,
    world: World,
    state: dict[str, Any],
    keep: int,
    best_step: int | None,
) -> Path:
    """Write ``checkpoint-<step>/``, then delete old checkpoints. The ``keep`` newest checkpoints up
    to this step stay.

    The files are written into a hidden folder, the manifest last. When all files are on disk, the
    folder is renamed to its final name. So a folder with the final name is a complete checkpoint,
    whenever the process is killed.

    Args:
        world: ranks that save together (FSDP). An error on one rank is raised on all these ranks.
            With ``SINGLE_PROCESS`` this process saves alone.
        state: JSON-serialisable facts of the run (progress, wandb id, resolved config, ...).
        best_step: step of a checkpoint that is kept whatever its age. None: no step.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: if a weight is not finite.
        OSError: if a file cannot be written.
    """
    final = Path(output_dir, f"checkpoint-{step}")
    partial = final.with_name(f".partial-{final.name}")
    # Under FSDP this is a collective, which gathers the weights in rank 0's host memory. So it
    # comes before the blocks below, in which one rank may fail alone.
    policy = trained.policy
    weights = full_trained_weights(policy.trained_model, policy.unused_by_text.values())
    with world.fail_together():
        trained.check_finite(step)
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "trainer").mkdir(parents=True)
            save_weights(policy.trained_model, weights, partial)
            policy.tokenizer.save_pretrained(partial)
    # A machine that does not share the folder would write its shards where no manifest lists them.
    with world.fail_together():
        if not partial.is_dir():
            raise OSError(
                f"{partial} is missing here: "
                "with runtime.parallel=fsdp all machines must share output_dir"
            )
    save_tensors(
        trained.optimizer_and_reference(),
        partial / TENSORS_FOLDER,
        is_single_process=world.is_single_process,
    )

    with world.fail_together():
        if world.is_main:
            (partial / STATE_FILE).write_text(json.dumps({"step": step} | state, indent=1))
            # All ranks have written their files by now, so the manifest can list them.
            digests = {
                str(file.relative_to(partial)): _digest(file)
                for file in sorted(partial.rglob("*"))
                if file.is_file()
            }
            (partial / MANIFEST_FILE).write_text(json.dumps({"files": digests}))
            publish(partial, final)
            # A checkpoint of a later step is broken, or was saved before the run was continued from
            # an earlier step. It does not count, and must not push out the checkpoint that was just
            # saved.
            earlier = [saved for saved in list_checkpoints(final.parent) if saved[0] <= step]
            for old_step, old in earlier[keep:]:
                if old_step != best_step:
                    shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return ``(step, folder)`` of each checkpoint, newest first. Broken checkpoints are listed
    too."""
    checkpoints = []
    for folder in output_dir.glob("checkpoint-*"):
        step = folder.name.removeprefix("checkpoint-")
        # A user may keep a copy with a name such as checkpoint-5-good. checkpoint.resume=auto does
        # not continue from it, and no run deletes it.
        if step.isdecimal() and folder.is_dir():
            checkpoints.append((int(step), folder))
    return sorted(checkpoints, reverse=True)


def recover(output_dir: Path) -> None:
    """Repair the folder after a kill: rename a complete checkpoint to its final name, and delete
    unfinished checkpoints."""
    # publish() deletes an older checkpoint of the same step before it renames the new folder. A
    # kill in between leaves the complete new folder under its hidden name.
    for partial in output_dir.glob(".partial-checkpoint-*"):
        if why_invalid(partial):
            shutil.rmtree(partial, ignore_errors=True)
        else:
            publish(partial, partial.with_name(partial.name.removeprefix(".partial-")))


def find_newest_valid(output_dir: Path) -> Path | None:
    """Return the folder of the newest valid checkpoint, or None. Print a warning for each broken
    checkpoint that is newer."""
    for _, folder in list_checkpoints(output_dir):
        problem = why_invalid(folder)
        if problem is None:
            return folder
        print(f"warning: skipping {problem}")
    return None


def why_invalid(folder: Path) -> str | None:
    """Return why a checkpoint is broken: a file that differs from the manifest, or an error in
    reading. Return None for a valid checkpoint."""
    # A damaged manifest may hold anything, so reading it may raise anything.
    try:
        digests = json.loads((folder / MANIFEST_FILE).read_bytes())["files"]
        for name, digest in digests.items():
            if _digest(folder / name) != digest:
                return f"{folder}: {name} is not what was saved"
    except Exception as error:
        return f"{folder} cannot be read ({type(error).__name__}: {error})"
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """Return the ``state`` that :func:`save_checkpoint` wrote into a valid checkpoint, with the
    entry ``step``."""
    return json.loads((folder / STATE_FILE).read_bytes())


def restore(folder: Path, trained: TrainedTensors) -> None:
    """Load the tensors of the optimizer, and of a reference that changes during training, in place.
    Each rank reads its shards.

    The weights of the policy are loaded elsewhere, by ``load_policy(folder)``. A reference that the
    checkpoint lacks keeps its values.

    Raises:
        ValueError: if the checkpoint holds optimizer state of a weight that the model does not
            train.
    """
    saved = saved_names(folder / TENSORS_FOLDER)
    model = trained.policy.model
    # A new optimizer has no tensors to load into. This call creates them, as an update would.
    create_optimizer_state(model, trained.optimizer)
    # An expert (MoE) that no token was sent to had no optimizer state when it was saved. It must
    # not begin with the step count that the call above has created.
    for name, parameter in model.named_parameters():
        if f"optimizer/{name}/step" not in saved:
            trained.optimizer.state.pop(parameter, None)
    tensors = trained.optimizer_and_reference()
    # Another version of transformers may name a module otherwise. The Adam averages of its weights
    # would be lost.
    for name in sorted(saved - tensors.keys()):
        if name.startswith("optimizer/"):
            raise ValueError(f"its {name} is of no weight that the model trains")
    saved_tensors = {name: tensor for name, tensor in tensors.items() if name in saved}
    load_tensors(saved_tensors, folder / TENSORS_FOLDER)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Weights as files, in a folder that trainer and servers both see, written before each rollout."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from grpo.distributed import World, gathered_on_main
from grpo.model import Policy, save_weights
from grpo.rollout.vllm.verify import CHECKED, Checksums
from grpo.system import UserError, first_line

PREFIX = "grpo-"
OWNER, LOCK = "owner", "lock"
"""Files of a run's folder: the first is locked as long as the run lives, the second while a rank restores the weights of a server."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MAX_FILE_BYTES = 5 * 10**9
"""Largest file of weights, as in the folders that transformers writes; a single larger tensor has a file of its own."""


@dataclass(frozen=True)
class Snapshot:
    """The policy's weights at one time, for the servers."""

    name: str
    """Unique over all runs."""
    folder: Path
    adapter: bool
    """The files hold a LoRA adapter; its name on the servers is ``name``."""
    checksums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the weights under vLLM's names; empty: they are not compared."""


class WeightsFolder:
    """The folder of one run inside ``rollout.weights_folder``. It disappears when the run ends; after a crash, when another run begins."""

    def __init__(self, parent: str, world: World):
        """All ranks call it; the main rank makes the folder. ValueError, on all ranks, if it cannot."""
        self.world, self._handle, self._count = world, None, 0
        path = None
        with world.fail_together():
            if world.is_main:
                path = self._create(Path(parent).absolute())  # the servers have another working directory
        self.path: Path = world.from_main(path)

    def _create(self, parent: Path) -> Path:
        token = f"{host_name()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        hidden, path = parent / f".{PREFIX}{token}", parent / f"{PREFIX}{token}"
        try:
            remove_abandoned(parent)
            # Locked before it gets its name: another run removes folders whose owner is not locked.
            hidden.mkdir()
            self._handle = os.open(hidden / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with contextlib.suppress(OSError):  # a network file system without locks
                fcntl.flock(self._handle, fcntl.LOCK_EX)
            hidden.rename(path)
        except OSError as error:
            raise UserError(
                f"rollout.weights_folder={parent} cannot be written ({error.strerror}): set it to another folder"
            ) from None
        return path

    def new_snapshot(self, *, adapter: bool) -> Snapshot:
        """The next one, not written yet. All ranks call it."""
        self._count += 1
        name = f"{self.path.name}-{self._count}"
        return Snapshot(name, self.path / name, adapter)

    def write(self, policy: Policy, *, with_checksums: bool) -> Snapshot:
        """Write the policy's weights, or its adapter, in the precision of the run. All ranks call it, and the main rank writes.

        ValueError, on all ranks, if the folder is too full.
        """
        snapshot = self.new_snapshot(adapter=policy.adapter is not None)
        found = policy.adapter.named_parameters() if snapshot.adapter else saved_tensors(policy.model, tied=True)
        tensors = [(name, t) for name, t in found if t.requires_grad or not snapshot.adapter]
        dtype = torch.float32 if snapshot.adapter else DTYPES[policy.precision]
        with self.world.fail_together():
            if self.world.is_main:
                self._make_room(snapshot.folder, sum(t.numel() for _, t in tensors) * dtype.itemsize)
        if snapshot.adapter:
            error = self._write_adapter(policy, tensors, snapshot.folder)
        else:
            is_known = getattr(policy.model.config, "model_type", None) in CHECKED
            error = self._write_model(policy.model, snapshot, dtype, with_checksums and is_known)
        with self.world.fail_together():
            if error is not None:
                shutil.rmtree(snapshot.folder, ignore_errors=True)
                raise UserError(
                    f"rollout.weights_folder={self.path.parent}: the weights cannot be written ({error}): free space there, or set another folder"
                )
        return self.world.from_main(snapshot)

    def _make_room(self, folder: Path, num_bytes: int) -> None:
        parent = self.path.parent
        try:
            free = shutil.disk_usage(self.path).free
            if free < num_bytes:
                raise UserError(
                    f"rollout.weights_folder={parent} has {size_of(free)} free, and the weights take {size_of(num_bytes)} (twice, while new "
                    "ones replace old ones): free space there, or set another folder"
                )
            folder.mkdir()
        except OSError as error:
            raise UserError(
                f"rollout.weights_folder={parent} cannot be written ({error.strerror}): set it to another folder"
            ) from None

    def _write_adapter(self, policy: Policy, tensors: list, folder: Path) -> str | None:
        state = dict(gathered_on_main(tensors, self.world))
        if not self.world.is_main:
            return None
        return _reason_of(lambda: save_weights(policy.adapter, state, folder))

    def _write_model(
        self, model: nn.Module, snapshot: Snapshot, dtype: torch.dtype, with_checksums: bool
    ) -> str | None:
        """Returns the main rank's error. All tensors are gathered also after an error, because other ranks take part in that.

        A tied weight is written under each of its names. On the CPU vLLM computes logits with a packed copy of the head, which it makes anew
        only when the files hold the head.
        """
        error, index, checksums = None, {}, Checksums()
        for number, part in enumerate(file_parts(model, tied=True), 1):
            file, tensors = f"model-{number:05d}.safetensors", {}
            for name, tensor in gathered_on_main(part, self.world):
                if self.world.is_main:
                    # A copy: safetensors takes no tensors that share memory.
                    tensors[name] = tensor.to(dtype, copy=True).contiguous()
                    if with_checksums:
                        checksums.add(name, tensors[name])
            if self.world.is_main and error is None:
                error = _reason_of(
                    lambda path=snapshot.folder / file, held=tensors: save_file(held, path, metadata={"format": "pt"})
                )
            index |= dict.fromkeys(tensors, file)
        if self.world.is_main and error is None:
            text = json.dumps({"metadata": {}, "weight_map": index})
            error = _reason_of(
                lambda: (snapshot.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
            )
        if with_checksums:
            snapshot.checksums.update(checksums.result())
        return error

    def keep_only(self, snapshot: Snapshot) -> None:
        """Delete all weights but these. The main rank calls it."""
        for folder in self.path.glob(f"{PREFIX}*"):
            if folder != snapshot.folder:
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Inside the block no other rank or thread holds the lock of this folder."""
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with contextlib.suppress(OSError):  # a network file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def close(self) -> None:
        """Delete the folder, on the main rank."""
        if self._handle is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._handle)
            self._handle = None


def _reason_of(write) -> str | None:
    """Call ``write``; the reason if it fails. safetensors reports a full disk in an exception of its own."""
    try:
        write()
    except Exception as error:  # SafetensorError, OSError
        return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return None


def size_of(num_bytes: int) -> str:
    """``3.1 GB``, ``28.0 MB``."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def host_name() -> str:
    """This machine's name, as a part of file names."""
    return re.sub(r"[^\w.]", "_", socket.gethostname())


def remove_abandoned(parent: Path) -> None:
    """Delete the folders of runs of this machine that have ended without deleting them: those whose owner file nobody holds locked.

    Some network file systems keep locks on each machine, where those of the others are not seen.
    """
    for folder in parent.glob(f"{PREFIX}{host_name()}-*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            handle = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def saved_tensors(model: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, a tied one once, or with ``tied`` under each of its names, and the buffers that a model folder has."""
    yield from model.named_parameters(remove_duplicate=not tied)
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def file_parts(
    model: nn.Module, max_bytes: int = MAX_FILE_BYTES, *, tied: bool = False
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of each file of a model folder; ``tied`` as in :func:`saved_tensors`."""
    part, size = [], 0
    for name, tensor in saved_tensors(model, tied=tied):
        num_bytes = tensor.numel() * tensor.element_size()
        if part and size + num_bytes > max_bytes:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += num_bytes
    yield part

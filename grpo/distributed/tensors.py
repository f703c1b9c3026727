"""State dicts of models and optimizers, and their tensors on disk
(``torch.distributed.checkpoint``).

Under FSDP each rank writes a file with its shards. Any number of ranks can read these files.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from grpo.distributed.parallel import is_sharded


def full_trained_weights(
    model: nn.Module,
    unused_by_text: Iterable[nn.Parameter],
) -> dict[str, torch.Tensor]:
    """Return the state dict of trained parameters, of the frozen parameters ``unused_by_text``, and
    of buffers. A tied weight stays one tensor under several names.

    For a sharded model all ranks must call this function together. Rank 0 gets the state dict in
    host memory, and the other ranks get an empty one. A sharded model has no parameters
    ``unused_by_text``.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    if not any(map(is_sharded, model.modules())):
        unused_by_text = set(unused_by_text)
        weights = model.state_dict()
        # With LoRA the weights of the base model are frozen, and no part of a checkpoint.
        for name, parameter in named:
            if not parameter.requires_grad and parameter not in unused_by_text:
                del weights[name]
        return weights
    options = StateDictOptions(
        full_state_dict=True,
        cpu_offload=True,
        ignore_frozen_params=True,
    )
    weights = get_model_state_dict(model, options=options)
    # PyTorch gathers a tied weight once per name. Without this, each copy would be saved.
    first_names = {}
    for name, parameter in named:
        if name in weights:
            first_name = first_names.setdefault(parameter, name)
            weights[name] = weights[first_name]
    return weights


def create_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create the tensors of an optimizer that has made no update yet."""
    # PyTorch makes an update without effect before it returns the state, which nobody needs here.
    get_optimizer_state_dict(model, optimizer)


def save_tensors(
    tensors: dict[str, torch.Tensor], folder: Path, *, is_single_process: bool
) -> None:
    """Write the tensors into ``folder``. Raise an OSError if a rank cannot write.

    Args:
        is_single_process: True if this process writes alone. Otherwise all ranks must call this
            function together, and an error on one rank is raised on all ranks.
    """
    with _plain_errors():
        # Without copying ahead, the writer makes no CUDA calls for tensors on the host.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        dcp.save(tensors, storage_writer=writer, no_dist=is_single_process)


def saved_names(folder: Path) -> set[str]:
    """Return the names of the tensors that :func:`save_tensors` has written into ``folder``."""
    metadata = _Reader(folder).read_metadata()
    return set(metadata.state_dict_metadata)


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill the tensors in place with the values that :func:`save_tensors` has written. Each rank
    reads its shards."""
    with _plain_errors():
        # Ranks read without a common plan, so a rank may fail alone.
        dcp.load(tensors, storage_reader=_Reader(folder), no_dist=True)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise a CheckpointException as an OSError that names the rank and the cause. A
    CheckpointException is a BaseException, which ``except Exception`` does not catch, and its
    message does not say the cause."""
    try:
        # A process that saves or reads alone does not need this warning.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {type(cause).__name__}: {cause}") from None


_ALLOWED_NAMES = re.compile(
    r"pathlib(\._local)?\.PosixPath"
    r"|torch\.(Size|float\d+|bfloat16|int64|uint8|serialization\._get_layout)"
    # Not metadata.BytesStorageMetadata: an entry of bytes is a pickle, which loading would run.
    r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo|metadata\.(?!Bytes)\w+)"
)
"""Pattern of the classes and functions that the metadata file of saved tensors may name. This file
is a pickle."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that refuses any class or function that :data:`_ALLOWED_NAMES` does not match."""

    def find_class(self, module: str, name: str) -> Any:
        if not _ALLOWED_NAMES.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reader of saved tensors that runs no code from the files. PyTorch's reader unpickles anything
    in the metadata file."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        # The file is read twice. The first reading only checks it, before PyTorch unpickles
        # anything.
        with open(path, "rb") as file:
            _MetadataUnpickler(file).load()
        return super().read_metadata(*args, **kwargs)

"""State dicts of models and optimizers, and their tensors on disk
(``torch.distributed.checkpoint``).

Under FSDP each rank writes a file of its shards, which any other number of ranks can read.
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
    unused_by_text: Iterable[nn.Parameter] = (),
) -> dict[str, torch.Tensor]:
    """Return the state dict of trained parameters, of the frozen parameters ``unused_by_text``, and
    of buffers.

    All ranks call it together for a sharded model, which has no such frozen parameters. The state
    dict is then in rank 0's host memory, and empty on the other ranks. A tied weight stays one
    tensor under several names.
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
    # PyTorch gathers a tied weight once per name. Several tensors would be saved several times.
    first_names = {}
    for name, parameter in named:
        if name in weights:
            first_name = first_names.setdefault(parameter, name)
            weights[name] = weights[first_name]
    return weights


def optimizer_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, torch.Tensor]:
    """Return the live tensors of the optimizer by ``<parameter>/<state>``; create them if there are
    none yet."""
    state = get_optimizer_state_dict(model, optimizer)["state"]
    tensors = {}
    for name, values in state.items():
        for key, value in values.items():
            tensors[f"{name}/{key}"] = value
    return tensors


def save_tensors(
    tensors: dict[str, torch.Tensor], folder: Path, *, is_single_process: bool
) -> None:
    """Write the tensors into ``folder``; OSError if a rank cannot.

    Args:
        is_single_process: True if this process writes alone. Otherwise all ranks call it together,
            and raise the error together.
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
    """Fill the tensors in place with those that :func:`save_tensors` has written. Each rank reads
    its shards."""
    with _plain_errors():
        # Ranks need no plan in common for reading, so that one may fail alone.
        dcp.load(tensors, storage_reader=_Reader(folder), no_dist=True)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of a rank as an OSError. A CheckpointException is a BaseException, which no
    ``except Exception`` catches, and its message does not say the cause."""
    try:
        # A process that saves or reads alone knows that torch.distributed is disabled.
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
"""Classes and functions that the pickled description of tensors may name."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that refuses a description of tensors that names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if not _ALLOWED_NAMES.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reader of tensors that runs no code. PyTorch's reader unpickles anything that the description
    of tensors holds."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        # Read twice: the first time only to refuse it before PyTorch unpickles it.
        with open(path, "rb") as file:
            _MetadataUnpickler(file).load()
        return super().read_metadata(*args, **kwargs)

"""State dicts of models and optimizers, and their tensors on disk
(``torch.distributed.checkpoint``).

Under FSDP each rank writes a file of its shares, which any other number of ranks can read.
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
    unreached: Iterable[nn.Parameter] = (),
) -> dict[str, torch.Tensor]:
    """The state dict of what is trained, of the frozen parameters ``unreached``, and of buffers.

    Of a sharded model, which has no such frozen parameters, it is in rank 0's host memory. Then all
    ranks call it together, and it is empty on the others. A tied weight stays one tensor under
    several names.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    if not any(map(is_sharded, model.modules())):
        kept = set(unreached)
        weights = model.state_dict()
        for name, parameter in named:
            if not parameter.requires_grad and parameter not in kept:
                del weights[name]
        return weights
    options = StateDictOptions(
        full_state_dict=True,
        cpu_offload=True,
        ignore_frozen_params=True,
    )
    weights = get_model_state_dict(model, options=options)
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
    """The optimizer's live tensors by ``<parameter>/<state>``; they are made if there are none
    yet."""
    state = get_optimizer_state_dict(model, optimizer)["state"]
    tensors = {}
    for name, values in state.items():
        for key, value in values.items():
            tensors[f"{name}/{key}"] = value
    return tensors


def save_tensors(
    tensors: dict[str, torch.Tensor], folder: Path, *, is_single_process: bool
) -> None:
    """Write the tensors into ``folder``: this process alone, or all ranks together, which then fail
    together."""
    with _plain_errors():
        # A thread may save while decode steps are captured, which forbids host syncs. Without
        # copying ahead the writer makes no CUDA calls for tensors on the host.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        dcp.save(tensors, storage_writer=writer, no_dist=is_single_process)


def saved_names(folder: Path) -> set[str]:
    """The names under which :func:`save_tensors` has written tensors."""
    metadata = _Reader(folder).read_metadata()
    return set(metadata.state_dict_metadata)


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill the tensors, in place, from what :func:`save_tensors` has written: each rank reads its
    own shares."""
    with _plain_errors():
        dcp.load(tensors, storage_reader=_Reader(folder), no_dist=True)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise a rank's error as an OSError: as a CheckpointException it is no Exception, and names no
    cause."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {type(first).__name__}: {first}") from None


_ALLOWED = re.compile(
    r"pathlib(\._local)?\.PosixPath|torch\.(Size|float\d+|bfloat16|int64|uint8|serialization\._get_layout)"
    r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo|metadata\.(?!Bytes)\w+)"
)
"""Names that the pickled description of tensors may hold. PyTorch unpickles anything, also entries
of bytes."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not _ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reads tensors and runs no code: PyTorch's own reader unpickles whatever the description
    holds."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with open(path, "rb") as file:
            _MetadataUnpickler(file).load()
        return super().read_metadata(*args, **kwargs)

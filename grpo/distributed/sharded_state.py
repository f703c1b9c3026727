"""Saves and loads tensors that are divided over the ranks, and gathers them one at a time.

``torch.distributed.checkpoint`` writes one file for each rank. What one number of ranks has written, any other number can read.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.types import Device

from grpo.distributed.world import World

_METADATA = {
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "torch": ("Size", "float32", "float64", "bfloat16", "float16", "int64"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}  # fmt: skip
"""Module -> the classes that the pickled description of a folder of tensors may hold. PyTorch unpickles any class."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reads tensors and runs no code: PyTorch's own reader unpickles whatever the description holds."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        with open(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            _MetadataUnpickler(file).load()
        return super().read_metadata(*args, **kwargs)


def save_divided(tensors: dict[str, torch.Tensor], folder: Path, world: World) -> None:
    """Write the tensors into ``folder``. All ranks call it; OSError on all of them if a rank cannot write."""
    try:
        with world.collective():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))
    except CheckpointException as error:  # a BaseException
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {first}") from None


def names_of_divided(folder: Path) -> set[str]:
    """The names under which :func:`save_divided` has written tensors."""
    return set(_Reader(folder).read_metadata().state_dict_metadata)


def load_divided(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill the tensors, in place, from what :func:`save_divided` has written: each rank reads its own shares, by itself.

    ValueError if the files do not hold them, or hold something else than tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=_Reader(folder), no_dist=True)
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise ValueError(f"{folder}: {first}") from None


def divide_like(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """This rank's share of a tensor that every rank has whole, divided as ``example`` is; whole where that is a plain tensor."""
    if not isinstance(example, DTensor):
        return tensor
    on_device = tensor.to(example.to_local().device)
    divided = distribute_tensor(on_device, example.device_mesh, example.placements, src_data_rank=None)
    return divided.clone()  # not a view of the whole tensor, which would stay in memory


def gathered_on_main(
    tensors: Iterable[tuple[str, torch.Tensor]], world: World, device: Device = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, whole tensor on the device)`` one at a time; an empty one on the other ranks. All ranks iterate to the end."""
    for name, tensor in tensors:
        with world.collective():
            found = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        yield name, found.to(device) if world.is_main else found.new_empty(0, device=device)

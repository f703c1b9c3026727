"""Saves and loads tensors that are divided over the ranks, and gathers them one at a time.

``torch.distributed.checkpoint`` writes one file for each rank. What one number of ranks has written, any other number can read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo.distributed.world import World


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
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def load_divided(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill the tensors, in place, from what :func:`save_divided` has written: each rank reads its own shares.

    ValueError if the files do not hold them.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # each rank reads for itself
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
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


def gathered_on_main(tensors: Iterable[tuple[str, torch.Tensor]], world: World) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, whole tensor in host memory)`` one at a time; an empty one on the other ranks. All ranks iterate to the end."""
    for name, tensor in tensors:
        with world.collective():
            found = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        yield name, found.cpu() if world.is_main else found.new_empty(0, device="cpu")

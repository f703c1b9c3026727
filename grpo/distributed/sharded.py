"""Fully sharded data parallelism (FSDP2): every rank holds a share of each weight, gradient and Adam average.

Each decoder layer is gathered while it computes. What is not in a layer (embedding, last norm, head) is the root group:
it is gathered from the start of a forward pass to the end of its backward pass. Weights, gradients and their reduction
are in fp32, and bf16 is autocast's, as under DDP.

Checkpoints have a file of each rank (``torch.distributed.checkpoint``), which any other number of ranks can read.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as whole_states
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from grpo.distributed.world import World
from grpo.system import UserError


def shard(
    root: nn.Module,
    layers: Iterable[nn.Module],
    weights: dict[str, torch.Tensor],
    world: World,
    *,
    shard_size: int | None = None,
    to_host: bool = False,
) -> None:
    """Divide a module whose parameters are on the meta device, in place, and fill it with rank 0's ``weights``.

    Args:
        layers: parts of ``root``, whose weights are given back after each forward pass; :func:`give_back` gives back
            those of the rest.
        shard_size: so many neighbouring ranks share one copy, which the others replicate (HSDP); None: all ranks.
        to_host: weights, gradients and Adam's averages lie in host memory; a layer goes to the GPU when it computes.
    """
    shape, names = (world.size,), ("shard",)
    if shard_size is not None and shard_size < world.size:
        shape, names = (world.size // shard_size, shard_size), ("replicate", "shard")
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if to_host else OffloadPolicy()
    options = dict(mesh=init_device_mesh(world.device.type, shape, mesh_dim_names=names), offload_policy=policy)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    root.compute_inside = lambda compute: compute()
    fully_shard(root, reshard_after_forward=False, **options)
    register_fsdp_forward_method(root, "compute_inside")
    buffers = {module: dict(module._buffers) for module in root.modules()}
    root.to_empty(device="cpu" if to_host else world.device)
    for module, kept in buffers.items():
        module._buffers.update({name: None if b is None else b.to(world.device) for name, b in kept.items()})
    options = whole_states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole_states.set_model_state_dict(root, weights, options=options)


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def compute_inside(root: nn.Module, compute: Callable[[], Any]) -> Any:
    """``compute()`` inside the root's forward pass, where any of its modules can be called, by all ranks alike."""
    if not is_sharded(root):
        return compute()
    try:
        return root.compute_inside(compute)
    finally:
        root.reshard()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside the block a layer or root group has its own weights whole; plain modules have them always."""
    if not is_sharded(module):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def give_back(root: nn.Module) -> None:
    """Free the root group's whole weights, which a pass without gradient leaves in memory."""
    if is_sharded(root):
        root.reshard()


def abandon_pass(root: nn.Module) -> None:
    """Make a sharded module ready for another pass after one that an exception has ended; UserError if PyTorch cannot."""
    if not hasattr(root, "reset_iter_state"):
        problem = (
            "memory ran out in a pass under runtime.parallel=fsdp, after which torch 2.11 cannot try a smaller one"
        )
        raise UserError(f"{problem}: lower optim.tokens_per_microbatch, or install a later torch")
    root.reset_iter_state()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a divided tensor, gathered from all ranks; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a divided tensor, which may be empty; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_bytes(module: nn.Module) -> int:
    """Bytes of the weights on this rank."""
    return sum(share(p).numel() * p.element_size() for p in module.parameters())


def whole_trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of what is trained, and of buffers; of a sharded model in rank 0's host memory.

    Then all ranks call it together, and it is empty on the other ranks. A tied weight stays one tensor under several
    names.
    """
    if not any(map(is_sharded, model.modules())):
        frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
    options = dict(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    found = whole_states.get_model_state_dict(model, options=whole_states.StateDictOptions(**options))
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in found:
            found[name] = found[first.setdefault(parameter, name)]
    return found


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's live tensors by ``<parameter>/<state>``; they are made if there are none yet."""
    state = whole_states.get_optimizer_state_dict(model, optimizer)["state"]
    return {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path, world: World | None) -> None:
    """Write the tensors into ``folder``; all ranks call it together, or with ``world=None`` this process alone.

    OSError, on all ranks, if one of them cannot write.
    """
    try:
        with warnings.catch_warnings(), world.collective() if world else contextlib.nullcontext():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Without copying ahead the writer makes no CUDA calls for tensors on the host: a thread may save while
            # decode steps are captured, and `torch.cuda.set_sync_debug_mode("error")` holds for all threads.
            writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
            dcp.save(tensors, storage_writer=writer, no_dist=world is None)
    except CheckpointException as error:  # a BaseException
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {first}") from None


def saved_names(folder: Path) -> set[str]:
    """The names under which :func:`save_tensors` has written tensors."""
    return set(_Reader(folder).read_metadata().state_dict_metadata)


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill the tensors, in place, from what :func:`save_tensors` has written: each rank reads its own shares.

    ValueError if the files do not hold them, or hold something else than tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=_Reader(folder), no_dist=True)
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise ValueError(f"{folder}: {first}") from None


_ALLOWED = re.compile(
    r"pathlib(\._local)?\.PosixPath|torch\.(Size|float\d+|bfloat16|int64|uint8|serialization\._get_layout)"
    r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo|metadata\.(?!Bytes)\w+)"
)
"""Names that the pickled description of tensors may hold. PyTorch unpickles anything, also entries of bytes."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not _ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reads tensors and runs no code: PyTorch's own reader unpickles whatever the description holds."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        with open(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            _MetadataUnpickler(file).load()
        return super().read_metadata(*args, **kwargs)

"""Data parallelism: DDP averages the gradients of whole models, FSDP2 those of sharded ones.

Under FSDP2 every rank holds a share of each weight, gradient and Adam average, and each decoder
layer is gathered while it computes. What is in no layer (embedding, last norm, head) is the root
group: it is gathered from the start of a forward pass to the end of its backward pass. Weights,
gradients and their reduction are in fp32, and bf16 is autocast's, as under DDP.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from grpo.distributed.world import World


def wrap_data_parallel(
    module: nn.Module,
    world: World,
    any_forward: Callable[[nn.Module], torch.Tensor],
) -> nn.Module:
    """Wrap ``module`` in DDP and fix the order of its gradient buckets. FSDP and a rank that is
    alone need no wrapper.

    DDP rebuilds its buckets after the first backward, in the order in which gradients arrived.
    Another order of buckets is another order of summation, so a resumed run would differ in the
    last bits from one that was not interrupted (visible from three ranks on). Two dummy backwards
    make DDP rebuild its buckets before training starts. ``any_forward`` returns any scalar that
    depends on all parameters.
    """
    if world.is_single_process or is_sharded(module):
        return module
    # The argument that keeps a forward pass from sending buffers has another name from torch 2.13
    # on.
    known = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = (
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    )
    wrapped = DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{sync_buffers: False},
    )
    for _ in range(2):
        (any_forward(wrapped) * 0.0).backward()
    wrapped.zero_grad(set_to_none=False)  # the gradients stay views of the buckets
    return wrapped


def gradient_sync(module: nn.Module, *, enabled: bool) -> contextlib.AbstractContextManager:
    """Average the gradients over ranks in this backward pass only if ``enabled``: for an update's
    last micro-batch.

    Earlier micro-batches add up their gradients on each rank, so every update averages once.
    """
    if is_sharded(module):
        module.set_requires_gradient_sync(enabled)
    elif isinstance(module, DistributedDataParallel) and not enabled:
        return module.no_sync()
    return contextlib.nullcontext()


def shard(
    root: nn.Module,
    layers: Iterable[nn.Module],
    weights: dict[str, torch.Tensor],
    world: World,
    *,
    shard_size: int | None = None,
    to_host: bool = False,
) -> None:
    """Shard a module whose parameters are on the meta device, in place, and fill it with rank 0's
    ``weights``.

    Args:
        layers: parts of ``root``, whose weights are freed after each forward pass;
            :func:`reshard` frees the others.
        shard_size: so many neighbouring ranks share one copy, which the others replicate (HSDP);
            None: all ranks.
        to_host: weights, gradients and Adam's averages lie in host memory; a layer goes to the GPU
            when it computes.
    """
    kind = world.device.type
    if shard_size is None or shard_size >= world.size:
        mesh = init_device_mesh(kind, (world.size,))
    else:
        mesh = init_device_mesh(
            kind,
            (world.size // shard_size, shard_size),
            mesh_dim_names=("replicate", "shard"),
        )
    policy = OffloadPolicy()
    if to_host:
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    root.compute_inside = lambda compute: compute()
    fully_shard(root, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    register_fsdp_forward_method(root, "compute_inside")

    # Buffers are not sharded, and keep their values.
    buffers = list(root.named_buffers(remove_duplicate=False))
    root.to_empty(device="cpu" if to_host else world.device)
    for name, buffer in buffers:
        owner, _, own_name = name.rpartition(".")
        root.get_submodule(owner)._buffers[own_name] = buffer.to(world.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(root, weights, options=options)


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def compute_inside(root: nn.Module, compute: Callable[[], Any]) -> Any:
    """``compute()`` inside the root's forward pass, where any of its modules can be called, by all
    ranks alike."""
    if not is_sharded(root):
        return compute()
    try:
        return root.compute_inside(compute)
    finally:
        root.reshard()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside the block a layer or root group has its own weights whole; plain modules have them
    always."""
    if is_sharded(module):
        module.unshard()
    try:
        yield
    finally:
        reshard(module)


def reshard(root: nn.Module) -> None:
    """Free the root group's whole weights, which a pass without gradient leaves in memory."""
    if is_sharded(root):
        root.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, gathered from all ranks; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a sharded tensor, which may be empty; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Data parallelism: DDP for replicated models, FSDP2 for sharded models.

Under FSDP2 every rank holds a shard of each weight, gradient and Adam average. The weights of a
decoder layer are gathered while the layer computes. Parameters outside any layer (embedding, last
norm, head) are the root group, which is gathered from the start of a forward pass to the end of its
backward pass. As under DDP, weights, gradients and the reduction of gradients are in fp32, and
autocast computes in bf16.
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
    """Wrap ``module`` in DDP, and make the order of its gradient buckets final by dummy passes.

    Args:
        any_forward: function that runs the wrapped module and returns a scalar that depends on all
            parameters.

    Returns:
        The wrapped module. A sharded module, or the module of a single process, is returned
        unchanged.
    """
    if world.is_single_process or is_sharded(module):
        return module
    # Buffers are equal on all ranks, and sending them in each forward pass would cost time. The
    # argument that turns this off has another name from torch 2.13 on.
    sync_buffers = "broadcast_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        sync_buffers = "forward_sync_buffers"
    wrapped = DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{sync_buffers: False},
    )
    # DDP rebuilds its buckets after the first backward, in the order in which gradients arrived.
    # Another order of buckets is another order of summation, so a resumed run would differ in the
    # last bits from one that was not interrupted (visible from three ranks on). Two dummy backwards
    # make DDP rebuild its buckets before training starts.
    for _ in range(2):
        (any_forward(wrapped) * 0.0).backward()
    # The gradients stay views of the buckets. If they were set to None, gradients would be
    # allocated a second time.
    wrapped.zero_grad(set_to_none=False)
    return wrapped


def gradient_sync(module: nn.Module, *, enabled: bool) -> contextlib.AbstractContextManager:
    """Return a context in which a backward pass averages the gradients over ranks only if
    ``enabled``.

    Averaging is enabled only for the last micro-batch of an update. Gradients of earlier
    micro-batches are added up on each rank, so that every update communicates once.
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
    shard_size: int | None,
    to_host: bool,
) -> None:
    """Shard a module in place (FSDP2), and fill it with the ``weights`` of rank 0. All ranks must
    call this function together.

    Args:
        root: module whose parameters are on the meta device.
        layers: modules in ``root`` whose full weights are freed after each forward pass.
            :func:`reshard` frees the full weights of all other modules.
        weights: state dict of ``root`` on rank 0; empty on the other ranks.
        shard_size: number of neighbouring ranks that hold one copy of the model together. Each
            group of this size holds a copy (HSDP). None: all ranks hold one copy.
        to_host: keep weights, gradients and Adam's averages in host memory. A layer is copied to
            the GPU when it computes.
    """
    device_type = world.device.type
    if shard_size is None or shard_size >= world.size:
        mesh = init_device_mesh(device_type, (world.size,))
    else:
        mesh = init_device_mesh(
            device_type,
            (world.size // shard_size, shard_size),
            mesh_dim_names=("replicate", "shard"),
        )
    policy = OffloadPolicy()
    if to_host:
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    # FSDP treats this method as a forward pass: the root group is gathered while it runs.
    root.run_in_forward_pass = lambda compute: compute()
    fully_shard(root, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    register_fsdp_forward_method(root, "run_in_forward_pass")

    # to_empty() allocates the parameters, and their values are loaded below. Buffers are kept:
    # to_empty() would lose their values, and a state dict lacks buffers that are not persistent.
    buffers = list(root.named_buffers(remove_duplicate=False))
    root.to_empty(device="cpu" if to_host else world.device)
    for name, buffer in buffers:
        module_name, _, buffer_name = name.rpartition(".")
        root.get_submodule(module_name)._buffers[buffer_name] = buffer.to(world.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(root, weights, options=options)


def is_sharded(module: nn.Module) -> bool:
    """True if FSDP2 has sharded the module."""
    return isinstance(module, FSDPModule)


def run_in_forward_pass(root: nn.Module, compute: Callable[[], Any]) -> Any:
    """Return the result of ``compute()``, called inside a forward pass of ``root``. So ``compute``
    can call any module in ``root``. All ranks must call this function together."""
    if not is_sharded(root):
        return compute()
    try:
        return root.run_in_forward_pass(compute)
    finally:
        # No backward pass follows that would free the root group.
        root.reshard()


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Gather the full weights of a layer or of the root group for the block. A module that is not
    sharded is left as it is."""
    if is_sharded(module):
        module.unshard()
    try:
        yield
    finally:
        reshard(module)


def reshard(root: nn.Module) -> None:
    """Free the full weights of a sharded module. A forward pass without gradient leaves the root
    group gathered in memory."""
    if is_sharded(root):
        root.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor from all ranks, and return the full tensor. Return a plain tensor
    unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor; the shard may be empty. Return a plain tensor
    unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

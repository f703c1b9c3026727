"""Data parallelism: DistributedDataParallel averages the gradients of whole models, FSDP2 (:mod:`grpo.distributed.sharded`) of divided ones."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grpo.distributed.sharded import is_sharded
from grpo.distributed.world import World


def wrap_data_parallel(module: nn.Module, world: World, any_forward: Callable[[nn.Module], torch.Tensor]) -> nn.Module:
    """Wrap ``module`` in DistributedDataParallel and fix the order of its gradient buckets.

    A rank that is alone gets it unchanged, and so does a divided module, which averages its gradients itself.

    DDP rebuilds its buckets after the first backward, in the order in which gradients arrived. Another bucket order is another order
    of summation, so a resumed run would differ in the last bits from one that was not interrupted (visible from three ranks on). Two
    dummy backwards make DDP rebuild its buckets before training starts. ``any_forward`` gives any scalar that depends on all parameters.
    """
    if world.is_alone or is_sharded(module):
        return module
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    # The argument that keeps a forward pass from sending buffers was renamed in torch 2.13, which warns of the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options = {"device_ids": device_ids, "gradient_as_bucket_view": True, sync_buffers: False}
    wrapped = DistributedDataParallel(module, **options)
    for _ in range(2):
        with world.collective():
            (any_forward(wrapped) * 0.0).backward()
    wrapped.zero_grad(set_to_none=False)  # the gradients stay views of the buckets
    return wrapped


def gradient_sync(module: nn.Module, *, enabled: bool) -> contextlib.AbstractContextManager:
    """Average the gradients over ranks in this backward pass only if ``enabled``: for the last micro-batch of an update.

    Earlier micro-batches add up their gradients on each rank, so every update averages once.
    """
    if is_sharded(module):
        module.set_requires_gradient_sync(enabled)
        return contextlib.nullcontext()
    if enabled or not isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext()
    return module.no_sync()

"""Fully sharded data parallelism (FSDP2): every rank holds a share of each weight, gradient and Adam average.

Each decoder layer is gathered while it computes. What is not in a layer (embedding, last norm, head) is the root group: it is gathered
from the start of a forward pass to the end of its backward pass. Weights, gradients and their reduction are in fp32, and bf16 is
autocast's, as under DDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from grpo.distributed.world import World


@dataclass(frozen=True)
class Sharding:
    """The division of a run's models over its ranks."""

    mesh: DeviceMesh
    num_shards: int
    """Ranks that share one copy of a model."""
    to_host: bool = False
    """Shards, gradients and Adam's averages lie in host memory (FSDP2's CPU offload); a layer goes to the GPU when it computes."""

    @classmethod
    def of(cls, world: World, shard_size: int | None, *, to_host: bool = False) -> Sharding:
        """Over all ranks, or with ``shard_size`` over so many neighbouring ranks, whose copies are replicated (HSDP)."""
        num_shards, kind = shard_size or world.size, world.device.type
        if num_shards == world.size:
            return cls(init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",)), num_shards, to_host)
        shape, names = (world.size // num_shards, num_shards), ("replicate", "shard")
        return cls(init_device_mesh(kind, shape, mesh_dim_names=names), num_shards, to_host)

    def layer(self, module: nn.Module) -> None:
        """Divide a decoder layer, in place. Its weights are given back after each forward pass."""
        fully_shard(module, mesh=self.mesh, reshard_after_forward=True, offload_policy=self._offload())

    def root(self, module: nn.Module) -> None:
        """Divide what is left of a module whose layers are divided. Its forward pass gathers it; :func:`give_back` divides it again."""
        module.compute_inside = lambda compute: compute()
        fully_shard(module, mesh=self.mesh, reshard_after_forward=False, offload_policy=self._offload())
        register_fsdp_forward_method(module, "compute_inside")

    def _offload(self) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self.to_host else OffloadPolicy()


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def compute_inside(root: nn.Module, compute: Callable[[], Any]) -> Any:
    """``compute()`` as a part of the root's forward pass, so that any of its modules can be called. All ranks must compute the same."""
    if not is_sharded(root):
        return compute()
    try:
        return root.compute_inside(compute)
    finally:
        root.reshard()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside the block a divided layer or root group has its whole weights (not those of layers below it); plain modules have them always."""
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
    """Make a divided module ready for another pass after one that an exception has ended."""
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

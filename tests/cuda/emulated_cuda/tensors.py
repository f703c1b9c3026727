"""Tensors that say ``cuda:0`` and compute on the CPU, and a mode that sees operations and refuses what CUDA refuses."""

from __future__ import annotations

import os
import threading
import traceback
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from emulated_cuda import ROOT
from emulated_cuda.kernels import PRODUCTS, compute

CUDA = torch.device("cuda", 0)
SYNCS = {"_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero"}
"""Operations whose CUDA kernels make the host wait, because the host needs a value or the size of the output."""
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
NOT_DETERMINISTIC = {"cumsum", "kthvalue", "histc", "cumprod"}
"""Operations on floating-point tensors that CUDA refuses in deterministic mode, as far as models use them."""


class Device:
    """The state of the emulated device, and what it has noticed."""

    def __init__(self):
        self.problems: list[str] = []
        """What a GPU would refuse, compute wrongly, or compute by a slow fallback."""
        self.capture = None
        """The graph that is being captured (:class:`emulated_cuda.graphs.Graph`), or None."""
        self.captured = self.replays = 0
        """Graphs that were captured, and replays of them."""
        self.stream = self.default_stream = None
        self.sync_debug_mode = "default"
        self.memory_limit = 80 * 2**30
        """In bytes; an allocation beyond it raises ``torch.OutOfMemoryError``."""
        self.allocated = self.peak = 0
        self.memory: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        """By address, as long as a tensor needs it. What a graph alone needs is not in it."""

    def problem(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(f"{ROOT}/grpo/")]
        self.problems.append(f"{what} @ {frames[-1].filename}:{frames[-1].lineno}" if frames else what)

    def sync(self, what: str) -> None:
        """The host waits for the device here."""
        if self.is_capturing():
            self.capture.is_invalid = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if self.sync_debug_mode in ("error", 2):
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")

    def is_capturing(self) -> bool:
        return self.capture is not None and self.capture.thread == threading.get_ident()


device = Device()


class Memory:
    """The memory of tensors that share it; it lives as long as they do."""

    def __init__(self, size: int):
        self.size = 0
        if device.allocated + size > device.memory_limit:
            raise torch.OutOfMemoryError("CUDA out of memory. (emulated)")
        self.size = size
        device.allocated += size
        device.peak = max(device.peak, device.allocated)

    def __del__(self):
        device.allocated -= self.size


class CudaTensor(torch.Tensor):
    """A tensor on the emulated device; ``elem`` holds its values."""

    @staticmethod
    def __new__(cls, elem: torch.Tensor):
        layout = dict(strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype, layout=elem.layout)
        tensor = torch.Tensor._make_wrapper_subclass(cls, elem.shape, **layout, device=CUDA)
        memory = device.memory.get(address_of(elem)) or Memory(elem.untyped_storage().nbytes())
        tensor.elem, tensor.memory = elem, memory
        device.memory[address_of(elem)] = memory
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with MODE:  # another thread than the one that entered the mode
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()


def address_of(elem: torch.Tensor) -> int:
    return elem.untyped_storage().data_ptr()


def tensors_in(things) -> list[torch.Tensor]:
    return [thing for thing in tree_leaves(things) if isinstance(thing, torch.Tensor)]


def is_cuda(thing) -> bool:
    return isinstance(thing, CudaTensor)


class Mode(TorchDispatchMode):
    """Sees every operation, and computes those of the emulated device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func._schema.name.partition("::")[2]
        tensors, target = tensors_in((args, kwargs)), kwargs.get("device")
        has_cuda = any(map(is_cuda, tensors))
        to_cuda = has_cuda if target is None else torch.device(target).type == "cuda"
        if not (has_cuda or to_cuda):
            return func(*args, **kwargs)
        if has_cuda:
            _refuse_two_devices(func, name, args, tensors)
        _notice_syncs(name, args, kwargs, to_cuda)
        if torch.are_deterministic_algorithms_enabled() and tensors and tensors[0].is_floating_point():
            _refuse_what_is_not_deterministic(func, name)
        if target is not None:
            kwargs["device"] = "cpu"
        plain_args, plain_kwargs = tree_map_only(CudaTensor, lambda x: x.elem, (args, kwargs))
        returns, arguments = func._schema.returns, func._schema.arguments
        is_write = any(x.alias_info and x.alias_info.is_write for x in arguments)
        is_view = any(x.alias_info and not x.alias_info.is_write for x in returns)
        if device.is_capturing() and is_write:  # in a graph nothing is computed until it is replayed
            device.capture.record(func, plain_args, plain_kwargs, [])
        else:
            out = compute(func, plain_args, plain_kwargs)
            if device.is_capturing() and not is_view:
                device.capture.record(func, plain_args, plain_kwargs, tensors_in(out))
        if is_write:
            return kwargs.get("out", args[0]) if returns else None
        return tree_map_only(torch.Tensor, CudaTensor, out) if to_cuda else out


MODE = Mode()


def _refuse_two_devices(func, name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
    """Copies may have them. The host may index what lies on the device. CPU tensors without dimensions are numbers."""
    free = tensors if name in COPIES else tensors_in(args[1]) if name in INDEXING and is_cuda(args[0]) else []
    for x in tensors:
        if not is_cuda(x) and x.dim() > 0 and not any(x is y for y in free):
            device.problem(f"two devices in {func}: a CPU tensor of shape {tuple(x.shape)}")
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu! ({func})")


def _notice_syncs(name: str, args: tuple, kwargs: dict, to_cuda: bool) -> None:
    if name in COPIES:
        source, to_cuda = (args[1], is_cuda(args[0])) if name == "copy_" else (args[0], to_cuda)
        if is_cuda(source) != to_cuda and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
            device.sync(f"copy to the {'device' if to_cuda else 'host'}")
    elif name in INDEXING and is_cuda(args[0]):
        if any(index.dtype in (torch.bool, torch.uint8) or not is_cuda(index) for index in tensors_in(args[1])):
            device.sync("index by a mask, or on the host")
    elif name in SYNCS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        device.sync(name)


def _refuse_what_is_not_deterministic(func, name: str) -> None:
    if name in NOT_DETERMINISTIC:
        raise RuntimeError(f"{name}_cuda_kernel does not have a deterministic implementation")
    if func in PRODUCTS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeError("Deterministic behavior was enabled, but CUBLAS_WORKSPACE_CONFIG is not set")

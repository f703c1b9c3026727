"""Tensors that say ``cuda:0`` and compute on the CPU, and a dispatch mode that sees every operation and notices what CUDA would not allow."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from emulated_cuda.kernels import compute

CUDA = torch.device("cuda", 0)
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
ALWAYS_SYNC = {
    "_local_scalar_dense", "_unique", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "unique_consecutive",
    "unique_dim", "unique_dim_consecutive",
}  # fmt: skip
"""Operations whose CUDA kernels make the host wait, because the host needs a value or the size of the output."""
MAY_MIX = {"_to_copy", "copy_", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that take tensors of two devices. All others take one-element CPU tensors without dimensions only."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
NO_KERNEL = {
    "_local_scalar_dense",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "_unsafe_view",
    "set_",
}
NOT_DETERMINISTIC = {"cumsum", "kthvalue", "histc", "cumprod"}
"""Operations on floating-point tensors that CUDA refuses under ``torch.use_deterministic_algorithms``, as far as models use them."""
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


class Device:
    """The state of the emulated device, and what has been noticed since :meth:`forget`."""

    def __init__(self):
        self.capture = None
        """The graph that is being captured (:class:`emulated_cuda.graphs.Graph`), or None."""
        self.pools_in_use: set[tuple[int, int]] = set()
        """Pools of graphs that new memory comes from; none, unless a graph is being captured."""
        self.sync_debug_mode = 0
        self.memory_limit = 80 * 2**30
        """In bytes; an allocation beyond it raises ``torch.OutOfMemoryError``."""
        self.allocated = self.peak = 0
        self.storages: dict[int, list[int]] = {}
        """By address: the number of living tensors of a storage, and its bytes."""
        self.lock = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """Start counting anew."""
        self.problems: list[str] = []
        """What a GPU would refuse, compute wrongly, or compute by a slow fallback."""
        self.syncs: Counter[str] = Counter()
        """Host-device synchronisations: ``"what @ file:line source"``."""
        self.kernels: Counter[str] = Counter()
        """Kernels that were launched, by operation. Replayed graphs are not in it."""
        self.attention: Counter[str] = Counter()
        """Calls of scaled dot-product attention, by the kernel that CUDA chooses."""
        self.captured: list[int] = []
        """Kernels in each captured graph."""
        self.replays = 0

    def problem(self, what: str) -> None:
        self.problems.append(f"{what} @ {where()}")

    def sync(self, what: str) -> None:
        """The host waits for the device here."""
        if self.is_capturing():
            self.problem(f"illegal while capturing: {what}")
            self.capture.is_invalid = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        self.syncs[f"{what} @ {where()}"] += 1
        if self.sync_debug_mode == 2:
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")

    def is_capturing(self) -> bool:
        return self.capture is not None and self.capture.thread == threading.get_ident()

    def allocate(self, storage: torch.UntypedStorage) -> int:
        """Count one more tensor of this storage; returns its address."""
        address, size = storage.data_ptr(), storage.nbytes()
        with self.lock:
            tensors = self.storages.setdefault(address, [0, size])
            tensors[0] += 1
            if tensors[0] == 1:
                tensors[1] = size
                self.allocated += size
                self.peak = max(self.peak, self.allocated)
        if self.allocated > self.memory_limit:
            raise torch.OutOfMemoryError("CUDA out of memory. (emulated)")
        return address

    def free(self, address: int) -> None:
        with self.lock:
            tensors = self.storages[address]
            tensors[0] -= 1
            if tensors[0] == 0:
                self.allocated -= tensors[1]
                del self.storages[address]

    def holds(self, address: int) -> bool:
        """True if a tensor of this storage is alive."""
        return address in self.storages


device = Device()


class CudaTensor(torch.Tensor):
    """A tensor on the emulated device; ``elem`` holds its values."""

    @staticmethod
    def __new__(cls, elem: torch.Tensor):
        layout = dict(strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype, layout=elem.layout)
        tensor = torch.Tensor._make_wrapper_subclass(cls, elem.shape, **layout, device=CUDA)
        tensor.elem, tensor.allocation = elem, _Allocation(elem)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl
    __hash__ = torch.Tensor.__hash__

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with MODE:  # another thread than the one that entered the mode
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_) -> str:
        return f"cuda:0 {self.elem!r}"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) not in memo:
            copied = CudaTensor(self.elem.detach().clone())
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = (
                torch.nn.Parameter(copied, self.requires_grad)
                if is_parameter
                else copied.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        device.sync("torch.save")
        return self.elem.detach().__reduce_ex__(protocol)

    def tolist(self):
        device.sync("tolist")
        return self.elem.tolist()

    def numpy(self, **_):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()


class _Allocation:
    """Lives as long as its tensor."""

    def __init__(self, elem: torch.Tensor):
        self.address = device.allocate(elem.untyped_storage())

    def __del__(self, free=device.free):
        if hasattr(self, "address"):
            free(self.address)


def unwrap(thing):
    return thing.elem if isinstance(thing, CudaTensor) else thing


def wrap(thing):
    return CudaTensor(thing) if isinstance(thing, torch.Tensor) and not isinstance(thing, CudaTensor) else thing


def where() -> str:
    """The nearest line of the project (or else of any other package than torch) that led here."""
    frame, fallback = sys._getframe(1), None
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(str(HERE)):
            if path.startswith(str(ROOT)) and "site-packages" not in path:
                return _line(path, frame.f_lineno)
            if fallback is None and f"{os.sep}torch{os.sep}" not in path:
                fallback = _line(path, frame.f_lineno)
        frame = frame.f_back
    return fallback or "the backward pass"


def _line(path: str, number: int) -> str:
    shown = os.path.relpath(path, ROOT) if path.startswith(str(ROOT)) else os.path.basename(path)
    return f"{shown}:{number} {linecache.getline(path, number).strip()}"


class Mode(TorchDispatchMode):
    """Sees every operation, and computes those of the emulated device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [thing for thing in tree_flatten((args, kwargs))[0] if isinstance(thing, torch.Tensor)]
        has_cuda = any(isinstance(tensor, CudaTensor) for tensor in tensors)
        target = kwargs.get("device")
        to_cuda = has_cuda if target is None else torch.device(target).type == "cuda"
        if not (has_cuda or to_cuda):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name not in MAY_MIX:
            _refuse_other_devices(func, tensors, has_cuda)
        _notice_syncs(func, name, args, kwargs, to_cuda)
        _refuse_what_is_not_deterministic(name, tensors)
        if target is not None:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        plain_args, plain_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
        returns, arguments = func._schema.returns, func._schema.arguments
        is_write = any(x.alias_info and x.alias_info.is_write for x in arguments)
        is_view = any(x.alias_info and not x.alias_info.is_write for x in returns)
        if not is_view and name not in NO_KERNEL:
            device.kernels[name] += 1
        if device.is_capturing() and is_write:  # in a graph nothing is computed until it is replayed
            device.capture.record(func, plain_args, plain_kwargs, None)
        else:
            out = compute(func, plain_args, plain_kwargs)
            if device.is_capturing() and not is_view:
                device.capture.record(func, plain_args, plain_kwargs, out)
        if is_write and returns:
            return kwargs["out"] if "out" in kwargs else args[0]
        if is_write:
            return None
        return tree_map(wrap, out) if to_cuda else out


MODE = Mode()


def _refuse_other_devices(func, tensors: list[torch.Tensor], has_cuda: bool) -> None:
    strange = [x for x in tensors if not isinstance(x, CudaTensor) and x.dim() > 0 and x.device.type == "cpu"]
    if has_cuda and strange:
        device.problem(f"two devices in {func}: a CPU tensor of shape {tuple(strange[0].shape)}")
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func})"
        )


def _notice_syncs(func, name: str, args: tuple, kwargs: dict, to_cuda: bool) -> None:
    if name in ("_to_copy", "copy_"):
        source = args[1] if name == "copy_" else args[0]
        to_cuda = isinstance(args[0], CudaTensor) if name == "copy_" else to_cuda
        from_cuda = isinstance(source, CudaTensor)
        is_async = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if from_cuda != to_cuda and not is_async:
            device.sync(f"copy to the {'device' if to_cuda else 'host'}")
    elif name in INDEXING:
        on_device = isinstance(args[0], CudaTensor)
        values = [args[2]] if len(args) > 2 else []
        for index in filter(lambda x: x is not None, args[1]):
            if isinstance(index, CudaTensor) and not on_device:
                device.problem(f"{func}: a CPU tensor is indexed by a CUDA tensor")
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            if on_device and not isinstance(index, CudaTensor):
                device.sync("index on the host")
            if index.dtype in (torch.bool, torch.uint8):
                device.sync("index by a mask")
        if any(isinstance(value, CudaTensor) != on_device and value.dim() > 0 for value in values):
            device.problem(f"{func}: values of another device")
            raise RuntimeError("Expected all tensors to be on the same device (index_put)")
    elif name in ALWAYS_SYNC or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        device.sync(name)


def _refuse_what_is_not_deterministic(name: str, tensors: list[torch.Tensor]) -> None:
    if not torch.are_deterministic_algorithms_enabled() or not tensors or not tensors[0].is_floating_point():
        return
    if name in NOT_DETERMINISTIC:
        device.problem(f"{name} is not deterministic")
        raise RuntimeError(f"{name}_cuda_kernel does not have a deterministic implementation")
    if name in PRODUCTS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        device.problem(f"{name} needs CUBLAS_WORKSPACE_CONFIG to be deterministic")
        raise RuntimeError(
            "Deterministic behavior was enabled, but this operation is not deterministic: set CUBLAS_WORKSPACE_CONFIG"
        )

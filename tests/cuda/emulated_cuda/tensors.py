"""Tensors that say ``cuda:0`` and compute on the CPU, and a mode that sees operations and refuses
what CUDA refuses."""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
SYNCS = {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero"}
"""Operations whose CUDA kernels make the host wait, because the host needs a value or the size of
the output."""
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Device:
    """The state of the emulated device."""

    def __init__(self):
        self.capture = None
        """The graph that is being captured (:class:`emulated_cuda.graphs.Graph`), or None."""
        self.memory = WeakValueDictionary()
        """By address, as long as a tensor needs it. What a graph alone needs is not in it."""

    def sync(self, what: str) -> None:
        """The host waits for the device here."""
        if self.is_capturing():
            self.capture.is_invalid = True
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what})"
            )

    def is_capturing(self) -> bool:
        return self.capture is not None and self.capture.thread == threading.get_ident()


device = Device()


class Memory:
    """The memory of tensors that share it; it lives as long as they do."""


class CudaTensor(torch.Tensor):
    """A tensor on the emulated device; ``elem`` holds its values."""

    @staticmethod
    def __new__(cls, elem: torch.Tensor):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=CUDA,
        )
        address = address_of(elem)
        tensor.elem = elem
        tensor.memory = device.memory.get(address) or Memory()
        device.memory[address] = tensor.memory
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls,
        func,
        types,
        args=(),
        kwargs=None,
    ):
        with MODE:  # another thread than the one that entered the mode
            return func(*args, **(kwargs or {}))

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):
        return self.elem.untyped_storage()


def address_of(elem: torch.Tensor) -> int:
    return elem.untyped_storage().data_ptr()


def tensors_in(things) -> list[torch.Tensor]:
    return [thing for thing in tree_leaves(things) if isinstance(thing, torch.Tensor)]


def is_cuda(thing) -> bool:
    return isinstance(thing, CudaTensor)


def compute(func, args: tuple, kwargs: dict):
    """The result of an operation on plain CPU tensors. CUDA has kernels from half precision to fp32
    besides."""
    if func in (aten.mm.dtype, aten.bmm.dtype):
        a, b, dtype = args
        return a.to(dtype) @ b.to(dtype)
    if func is aten._softmax.default or func is aten._log_softmax.default:
        x, dim, half_to_float = args
        return func(x.float() if half_to_float else x, dim, False)
    return func(*args, **kwargs)


class Mode(TorchDispatchMode):
    """Sees every operation, and computes those of the emulated device."""

    def __torch_dispatch__(
        self,
        func,
        types,
        args=(),
        kwargs=None,
    ):
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        tensors = tensors_in((args, kwargs))
        target = kwargs.get("device")
        has_cuda = any(map(is_cuda, tensors))
        to_cuda = has_cuda if target is None else torch.device(target).type == "cuda"
        if not (has_cuda or to_cuda):
            return func(*args, **kwargs)
        if has_cuda and name not in COPIES and not (name in INDEXING and is_cuda(args[0])):
            for x in tensors:
                if not is_cuda(x) and x.dim() > 0:  # without dimensions it is a number
                    raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        _notice_syncs(name, args, kwargs, to_cuda)
        if target is not None:
            kwargs["device"] = "cpu"
        plain_args, plain_kwargs = tree_map_only(
            CudaTensor,
            lambda x: x.elem,
            (args, kwargs),
        )
        returns = func._schema.returns
        is_write = any(x.alias_info and x.alias_info.is_write for x in func._schema.arguments)
        is_view = any(x.alias_info and not x.alias_info.is_write for x in returns)
        # in a graph nothing is computed until it is replayed
        if device.is_capturing() and is_write:
            device.capture.record(func, plain_args, plain_kwargs, [])
        else:
            out = compute(func, plain_args, plain_kwargs)
            if device.is_capturing() and not is_view:
                device.capture.record(func, plain_args, plain_kwargs, tensors_in(out))
        if is_write:
            return kwargs.get("out", args[0]) if returns else None
        return tree_map_only(torch.Tensor, CudaTensor, out) if to_cuda else out


MODE = Mode()


def _notice_syncs(
    name: str,
    args: tuple,
    kwargs: dict,
    to_cuda: bool,
) -> None:
    if name in COPIES:
        source = args[1] if name == "copy_" else args[0]
        to_cuda = is_cuda(args[0]) if name == "copy_" else to_cuda
        is_blocking = not kwargs.get("non_blocking", len(args) > 2 and args[2])
        if is_cuda(source) != to_cuda and is_blocking:
            device.sync(f"copy to the {'device' if to_cuda else 'host'}")
    elif name in INDEXING and is_cuda(args[0]):
        for index in tensors_in(args[1]):
            if index.dtype in (torch.bool, torch.uint8) or not is_cuda(index):
                device.sync("index by a mask, or on the host")
    elif name in SYNCS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        device.sync(name)

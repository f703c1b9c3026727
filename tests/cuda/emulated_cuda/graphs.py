"""Streams, and graphs that record operations with their memory and replay them."""

from __future__ import annotations

import itertools
import threading

import torch
from torch.utils._pytree import tree_flatten

from emulated_cuda.kernels import compute
from emulated_cuda.tensors import CUDA, NO_KERNEL, device


class Stream:
    """A stream. Everything runs at once and in order."""

    def __init__(self, device=None, priority=0, **_):
        self.device = CUDA

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        device.sync("Stream.synchronize")


class Event:
    def __init__(self, enable_timing=False, **_):
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        device.sync("Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1.0  # milliseconds


class Streams:
    """The current stream of the process."""

    default = Stream()
    current = default

    @classmethod
    def use(cls, stream: Stream) -> None:
        cls.current = stream


def _tensors(things) -> list[torch.Tensor]:
    return [thing for thing in tree_flatten(things)[0] if isinstance(thing, torch.Tensor)]


_numbers = itertools.count(1)


def new_pool() -> tuple[int, int]:
    """``torch.cuda.graph_pool_handle``."""
    return (0, next(_numbers))


class Graph:
    """``torch.cuda.CUDAGraph``: replays what was recorded, on the memory that was recorded; notices memory that was freed since."""

    def __init__(self, keep_graph=False):
        self.recorded, self.is_invalid, self.thread = [], False, None

    def capture_begin(self, pool=None, capture_error_mode="global", **_) -> None:
        assert device.capture is None, "another capture is under way"
        if Streams.current is Streams.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.thread, self.number, device.capture = threading.get_ident(), pool or new_pool(), self
        device.pools_in_use.add(self.number)

    def capture_end(self) -> None:
        device.capture = None
        if self.is_invalid:  # as in PyTorch, allocations go on to come from the graph's pool
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        device.pools_in_use.discard(self.number)
        made = {self._address(tensor) for *_, out in self.recorded for tensor in _tensors(out)}
        read = {self._address(tensor) for _, args, kwargs, _ in self.recorded for tensor in _tensors((args, kwargs))}
        self.outside = read - made
        """Addresses of memory that the graph reads or writes, and does not own."""
        device.captured.append(sum(func._schema.name.partition("::")[2] not in NO_KERNEL for func, *_ in self.recorded))

    def record(self, func, args: tuple, kwargs: dict, out) -> None:
        self.recorded.append((func, args, kwargs, out))

    def replay(self) -> None:
        device.replays += 1
        for func, args, kwargs, out in self.recorded:
            for tensor in _tensors((args, kwargs)):
                address = self._address(tensor)
                if address in self.outside and not device.holds(address):
                    device.problem(f"a graph reads freed memory: {tuple(tensor.shape)} {tensor.dtype} in {func}")
            for old, new in zip(
                _tensors(out), _tensors(compute(func, args, kwargs)) if out is not None else (), strict=True
            ):
                old.copy_(new)
            if out is None:
                compute(func, args, kwargs)

    def reset(self) -> None:
        self.recorded = []

    def pool(self) -> tuple[int, int]:
        return self.number

    @staticmethod
    def _address(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

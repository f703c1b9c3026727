"""Streams, and graphs that record operations with their memory and replay them."""

from __future__ import annotations

import threading

import torch

from emulated_cuda.kernels import compute
from emulated_cuda.tensors import CUDA, address_of, device, tensors_in


class Stream:
    """A stream. Operations run immediately, in the order of the calls."""

    def __init__(self, *_, **__):
        self.device = CUDA

    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        device.sync("Stream.synchronize")


class Graph:
    """``torch.cuda.CUDAGraph``: replays operations on the memory they were recorded with; notices if it was freed."""

    def __init__(self):
        self.recorded, self.made, self.is_invalid, self.thread = [], set(), False, None

    def capture_begin(self, pool: tuple[int, int] | None = None, **_) -> None:
        assert device.capture is None, "another capture is under way"
        if device.stream is device.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        device.capture, self.thread = self, threading.get_ident()

    def capture_end(self) -> None:
        device.capture = None
        if self.is_invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        device.captured += 1

    def record(self, func, args: tuple, kwargs: dict, outputs: list[torch.Tensor]) -> None:
        """``outputs``: new tensors; none, where the operation writes into an argument."""
        self.recorded.append((func, args, kwargs, outputs))
        self.made |= set(map(address_of, outputs))

    def replay(self) -> None:
        device.replays += 1
        for func, args, kwargs, outputs in self.recorded:
            for tensor in tensors_in((args, kwargs)):
                if not (address_of(tensor) in self.made or address_of(tensor) in device.memory):
                    device.problem(f"a graph reads freed memory: {tuple(tensor.shape)} {tensor.dtype} in {func}")
            computed = tensors_in(compute(func, args, kwargs))
            for old, new in zip(outputs, computed[: len(outputs)], strict=True):
                old.copy_(new)

    def pool(self) -> tuple[int, int]:
        return (0, 1)

"""Streams, and graphs that record operations with their memory and replay them."""

from __future__ import annotations

import threading

from emulated_cuda.tensors import CUDA, address_of, compute, device, tensors_in


class Stream:
    """A stream. Operations run immediately, in the order of the calls."""

    def __init__(self, *_, **__):
        self.device = CUDA

    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    """``torch.cuda.CUDAGraph``: replays operations on the memory they were recorded with; an error
    if it was freed."""

    def __init__(self):
        self.recorded = []
        self.made = set()
        self.is_invalid = False

    def capture_begin(self, *_, **__) -> None:
        assert device.capture is None, "another capture is under way"
        assert device.stream is not device.default_stream, "a capture needs a stream of its own"
        device.capture = self
        self.thread = threading.get_ident()

    def capture_end(self) -> None:
        device.capture = None
        if self.is_invalid:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    def record(self, func, args, kwargs, outputs) -> None:
        """``outputs``: new tensors; none, where the operation writes into an argument."""
        self.recorded.append((func, args, kwargs, outputs))
        self.made.update(map(address_of, outputs))

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.recorded:
            for tensor in tensors_in((args, kwargs)):
                address = address_of(tensor)
                if address not in self.made and address not in device.memory:
                    raise RuntimeError(f"a graph reads freed memory: {tensor.shape} in {func}")
            computed = tensors_in(compute(func, args, kwargs))
            for old, new in zip(
                outputs,
                computed[: len(outputs)],
                strict=True,
            ):
                old.copy_(new)

    def pool(self) -> tuple[int, int]:
        return (0, 1)

"""Decode steps as CUDA graphs: a step is captured, and then replayed by one launch for each token.

Launching the hundreds of small kernels of a decode step takes longer than running them.

A captured step reads and writes the tensors that it was captured with, so no shape may change. The
step attends to a fixed number of completion tokens, its *width*. Tokens that have not been drawn
yet are masked. When rows leave or join, or have as many tokens as the width, the next step is
captured anew.

An H100 has run an earlier form of this code (``benchmarks/results/h100.md``). Tests replay captured
steps on an emulated CUDA device (``tests/cuda/``), and run the steps on the CPU without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.attention import ForkedCache
from grpo.attention.forked import additive_mask
from grpo.attention.precision import is_close
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.system import first_line

COMPLETION_BUCKET = 256
"""Number whose multiples are the widths of steps. With a larger number, steps read more masked
tokens. With a smaller number, steps are captured more often."""


@dataclass
class CUDAGraphs:
    """State that all graphs of an engine share."""

    warn: Callable[[str], None]
    """Called with a line of text if a step cannot be captured."""
    are_on: bool = True
    """False after a step could not be captured. No other capture is tried then."""
    last: torch.cuda.CUDAGraph | None = None
    """The latest graph. The next graph uses the memory pool of the latest graph."""


class CapturedSteps:
    """Decode steps of a :class:`LlamaDecoder`, replayed as long as rows and width are the same."""

    def __init__(self, decoder: LlamaDecoder, graphs: CUDAGraphs):
        self.decoder = decoder
        self.graphs = graphs
        self.cache = None
        """View of the KV cache that the captured step uses. None before the first capture."""

    def __call__(self, token_R: Tensor, cache: ForkedCache) -> Tensor:
        """Last hidden states ``[R, E]`` of a :class:`LlamaDecoder`. The next call may overwrite
        them."""
        if not self.graphs.are_on:
            return self.decoder(token_R, cache)

        # Room for the token at index ``length``, which this step computes.
        num_buckets = cache.length // COMPLETION_BUCKET + 1
        width = min(num_buckets * COMPLETION_BUCKET, cache.capacity)
        fixed = self.cache
        # Every change of the rows makes a new ``start_R``.
        if fixed and fixed.start_R is cache.start_R and fixed.length == width:
            # The graph reads its inputs from the tensors that it was captured with.
            self.token_R.copy_(token_R)
            fixed.last_1.fill_(cache.length)
            self.replay()
        else:
            self.token_R = token_R.clone()
            self.cache = FixedWidthCache(cache, width)
            self._capture()
        cache.length += 1
        return self.hidden_RH

    def _capture(self) -> None:
        """Compute a step without a graph, and capture the step for the tokens that follow.

        The graph is replayed once and the result compared, before any token is drawn from a replay.
        """
        self._step()
        expected_RH = self.hidden_RH
        reason = None
        try:
            self.replay = self._replay_of_step()
            self.replay()
            if not is_close(self.hidden_RH, expected_RH, 0.1):
                raise RuntimeError("a replayed step gives other results")
        except Exception as error:  # an error of the driver, or out of memory
            # An error inside the step says more than the error that it causes at the end of the
            # capture.
            reason = first_line(error.__context__ or error)
        # After the except block, since the error's traceback holds the memory of the failed graph.
        if reason is not None:
            self.graphs.are_on = False
            self.graphs.warn(f"note: decode steps are not captured in CUDA graphs ({reason})")
            self._step()  # again, because a wrong replay has stored wrong keys and values

    def _step(self) -> None:
        self.hidden_RH = self.decoder(self.token_R, self.cache)

    def _replay_of_step(self) -> Callable[[], None]:
        """Return a function that replays a graph of the step, or on a CPU computes the step."""
        if not self.token_R.is_cuda:
            return self._step
        graph = torch.cuda.CUDAGraph()
        last = self.graphs.last
        # NCCL's threads may call CUDA during the capture. (The thread that saves checkpoints does
        # not.)
        capture = torch.cuda.graph(
            graph,
            pool=None if last is None else last.pool(),
            capture_error_mode="thread_local",
        )
        # If the capture ends with an error, only the outer block restores the stream.
        with torch.cuda.stream(torch.cuda.current_stream()), capture:
            self._step()
        self.graphs.last = graph
        return graph.replay


class FixedWidthCache(ForkedCache):
    """A view of a KV cache for captured steps, which attend to ``width`` completion tokens.

    The tensor ``last_1`` holds the index of the token being computed. Later indices are masked.
    """

    def __init__(self, cache: ForkedCache, width: int):
        vars(self).update(vars(cache))
        self.llama_decoder = None  # no reference cycle: the decoder refers to this cache
        self.use_cpu_kernel = False  # tests on a CPU run the operations that a GPU captures
        self.last_1 = self.start_R.new_tensor([cache.length])
        self.index_C = torch.arange(width, device=self.start_R.device)
        self.length = width
        # Values at later indices are masked: they are multiplied by 0. But unwritten memory may
        # hold NaN, and 0 * NaN is NaN.
        for buffers in self.completion_kv.values():
            for buffer in buffers:
                buffer[:, :, cache.length : width] = 0

    def begin_token(self) -> Tensor:
        """Return the tokens' positions ``[R]`` without advancing: the caller sets ``last_1``."""
        self.mask_R1NS = None
        is_before_R11C = self.index_C < self.start_R[:, None, None, None]
        is_later_C = self.index_C > self.last_1
        self.completion_bias = additive_mask(is_before_R11C | is_later_C, self.dtype)
        return self.offset_R + self.last_1

    def _store_token(
        self,
        layer: int,
        k_RK1D: Tensor,
        v_RK1D: Tensor,
    ) -> None:
        # A graph would keep the index of a slice from its capture. A tensor's value may change.
        k_buffer, v_buffer = self.completion_kv[layer]
        k_buffer.index_copy_(2, self.last_1, k_RK1D)
        v_buffer.index_copy_(2, self.last_1, v_RK1D)

"""Decode steps as CUDA graphs: a step is captured, and then replayed by one launch for each token.

Launching the hundreds of small kernels of a decode step takes longer than running them, and reading
at every token which rows have ended makes the device wait for the host. Therefore the host reads
what was drawn only every ``SYNC_EVERY`` tokens.

A captured step reads and writes the tensors that it was captured with, so no shape may change: rows
that have ended are computed further, and a step attends to a fixed number of own tokens, of which
those not drawn yet are masked. When three quarters of the rows have ended, or rows have as many
tokens as a step attends to, the next step is captured anew.

Captured steps are compiled where :mod:`grpo.attention.fast_paths` may be used. Graphs decode two
rows or more, because the compiler makes another variant for a single one.

Graphs belong to one wave of rows: they read the wave's KV cache and copies of weights. The memory
pool of the last graph outlives the wave. Logits differ from those of
:mod:`grpo.rollout.decode_loop` by rounding alone.

An H100 has run this (``benchmarks/results/h100.md``). Tests capture and replay the steps on an
emulated CUDA device (``tests/cuda/``), and run them on the CPU without graphs.

Shapes: ``S`` rows that are decoded together, ``R`` rows at the start, ``T`` most tokens of a
completion, ``C`` own tokens that a step attends to, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from grpo.attention import ForkedCache, fast_paths, forked_hidden
from grpo.attention.forked import additive_mask
from grpo.model import Policy
from grpo.rollout.decode_loop import Prefill, Prompts, Row
from grpo.rollout.draw import SamplingParams, draw
from grpo.rollout.prefill import ForkedCacheDecoder
from grpo.rollout.stops import Stops

SYNC_EVERY = 8
"""Decode steps between two reads of which rows have ended."""
OWN_BUCKET = 256
"""The number of own tokens that a step attends to is a multiple of this."""
LEAST_LIMIT = {"fp32": 0.003, "bf16": 0.03}
"""Shares of the logits' standard deviation by which a replay may always differ, however little
rounding is measured."""


class CUDAGraphRunner:
    """Decodes waves of rows by captured steps.

    With ``capture=False`` the same steps run without graphs, on any device.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        capture: bool = True,
    ):
        self.policy = policy
        self.capture = capture
        self.fast_parts = [fast_paths.STEP] if fast_paths.may_use(policy.device) else []
        """The parts of :mod:`grpo.attention.fast_paths` that captured steps use."""
        self.verified: set[bool] = set()
        """The kinds of sampling (whether it is greedy) for which replayed steps have agreed with
        the decode loop's."""
        self._graph: torch.cuda.CUDAGraph | None = None
        """The last graph, which holds the memory pool for the next one."""

    def decode(
        self,
        prefill: Prefill,
        prompts: Prompts,
        uniforms_RT: Tensor | None,
        sampling: SamplingParams,
        on_tokens: Callable[[int], None] | None,
    ) -> list[Row]:
        """Decode every row to its end; see :func:`grpo.rollout.decode_loop.decode`.

        RuntimeError if a replayed step computes other logits than the decode loop; errors of the
        compiler and of the capture propagate.
        """
        stops = Stops(self.policy, sampling.stop)
        decoder, logits_RV = prefill(prompts, sampling.max_completion_length)
        rows = [Row(number, prompt) for number, prompt in enumerate(prompts)]
        batch = _Batch(rows, decoder, uniforms_RT, sampling, self.fast_parts)
        batch.needs_check = sampling.is_greedy not in self.verified
        batch.draw(logits_RV)
        start = 0  # tokens of each row that the host has read
        while True:
            end = decoder.cache.length + 1  # the last token drawn is not in the cache yet
            batch.read(start, end, stops.ids)
            live = [slot for slot, row in enumerate(batch.rows) if not row.finished]
            goes_on = live and end < sampling.max_completion_length
            if goes_on:
                self._queue_steps(batch, live)

            # The device computes the next tokens while the host looks for stop strings in these.
            num_new = 0
            for row in rows:
                if stops.strings and len(row.tokens) > start:
                    first = max(start + 1 - stops.span, 0)
                    length = stops.first_end(row.tokens[first:], start - first)
                    if length is not None:
                        row.cut(first + length)
                num_new += max(len(row.tokens) - start, 0)
            if on_tokens is not None:
                on_tokens(num_new)
            if not goes_on:
                return rows
            start = end

    def _queue_steps(self, batch: _Batch, live: list[int]) -> None:
        """Let the device draw tokens up to the next read. ``live``: slots of rows that go on."""
        if 1 < len(live) <= len(batch.rows) // 4:
            batch.keep(live)
        cache = batch.decoder.cache
        T = batch.sampling.max_completion_length
        end = min(cache.length + SYNC_EVERY, T - 1)
        num_buckets = math.ceil(end / OWN_BUCKET)
        width = min(num_buckets * OWN_BUCKET, T)
        if batch.cache is None or batch.cache.length != width:
            batch.cache = FixedWidthCache(cache, batch.last_1, width)
            batch.replay = self._captured(batch.step)
            cache.length += 1
        if batch.needs_check and cache.length < end:
            self._check(batch)
        while cache.length < end:
            batch.replay()
            cache.length += 1

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run the step once, which draws a token, then capture it in a graph, which does not.

        Returns the graph's replay. The run before compiles what is not compiled yet.
        """
        step()
        if not self.capture:
            return step
        graph = torch.cuda.CUDAGraph()
        pool = None if self._graph is None else self._graph.pool()
        # NCCL's threads may call CUDA meanwhile. (The thread that saves does not.)
        capture = torch.cuda.graph(graph, pool, capture_error_mode="thread_local")
        # If the capture ends with an error, only the outer block restores the stream.
        with torch.cuda.stream(torch.cuda.current_stream()), capture:
            step()
        self._graph = graph
        return graph.replay

    def _check(self, batch: _Batch) -> None:
        """Replay a step, and compare it with the loop's step, which nothing captures or compiles.

        RuntimeError if logits differ by more than rounding, or if other tokens or log-probs are
        recorded than the replay's logits give. Rounding is measured as the difference between the
        loop's step and the model's own modules.
        """
        decoder = batch.decoder
        num_own = decoder.cache.length
        token_S = batch.tokens_ST[:, num_own]
        positions_S = decoder.positions_R + num_own

        def logits_by(hidden_of_token: Callable) -> Tensor:
            decoder.cache.length = num_own
            hidden_SH = hidden_of_token(token_S, positions_S, decoder.cache)
            return decoder.head(hidden_SH).float()

        expected_SV = logits_by(decoder.hidden_of_token)
        other_SV = logits_by(partial(forked_hidden, self.policy.backbone))

        # The replay must read the keys and values that it stores itself.
        for buffers in decoder.cache.own.values():
            for buffer in buffers:
                buffer[:, :, num_own] = torch.nan
        batch.replay()

        error_S = (batch.logits_SV.float() - expected_SV).std(dim=-1)
        noise = (other_SV - expected_SV).std(dim=-1).mean()
        scale = expected_SV.std(dim=-1).mean()
        least = LEAST_LIMIT[self.policy.precision] * scale
        limit = torch.maximum(4 * noise, least)
        agrees = error_S.mean() <= limit and error_S.max() <= 5 * limit

        drawn = draw(
            batch.logits_SV,
            batch.uniforms(),
            batch.sampling,
        )
        recorded = (
            batch.tokens_ST[:, num_own + 1],
            batch.logprobs_ST[:, num_own + 1],
        )
        if not (agrees and all(map(torch.equal, drawn, recorded))):
            raise RuntimeError("they give other results than the same steps without graphs")
        self.verified.add(batch.sampling.is_greedy)


class _Batch:
    """The rows that are decoded together, in tensors that captured steps read and write."""

    def __init__(
        self,
        rows: list[Row],
        decoder: ForkedCacheDecoder,
        uniforms_RT: Tensor | None,
        sampling: SamplingParams,
        fast_parts: list[str],
    ):
        S = len(rows)
        T = sampling.max_completion_length
        self.decoder = decoder
        self.uniforms_ST = uniforms_RT
        self.sampling = sampling
        self.fast_parts = fast_parts
        self.needs_check = False
        """True if one of the steps between two reads is checked."""
        self.rows = rows
        """Rows with the tokens that the host has read; a row's index is its slot."""
        self.last_1 = decoder.positions_R.new_tensor([-1])
        """Index of the token drawn last, counted on the device. The KV cache lacks that token."""
        self.tokens_ST = decoder.positions_R.new_zeros(S, T)
        self.logprobs_ST = torch.zeros_like(self.tokens_ST, dtype=torch.float32)
        self.logits_SV: Tensor | None = None
        """Logits from which a step drew the last tokens."""
        self.cache: FixedWidthCache | None = None
        """The cache as :meth:`step` sees it."""
        self.replay: Callable[[], None] | None = None
        """Repeats :meth:`step` as it was captured, on the tensors that it had then."""

    def step(self) -> None:
        """Compute logits from the last token of every row, and draw the next token."""
        decoder = self.decoder
        token_S = self.tokens_ST.index_select(1, self.last_1).squeeze(1)
        with fast_paths.only(*self.fast_parts):
            hidden_SH = decoder.hidden_of_token(
                token_S,
                decoder.positions_R + self.last_1,
                self.cache,
            )
        self.logits_SV = decoder.head(hidden_SH)
        self.draw(self.logits_SV)

    def draw(self, logits_SV: Tensor) -> None:
        """Draw the next token of every row, without a host sync."""
        self.last_1.add_(1)
        token_S, logprob_S = draw(
            logits_SV,
            self.uniforms(),
            self.sampling,
        )
        self.tokens_ST.index_copy_(1, self.last_1, token_S[:, None])
        self.logprobs_ST.index_copy_(1, self.last_1, logprob_S[:, None])

    def uniforms(self) -> Tensor | None:
        """The numbers from which the tokens at ``last_1`` are drawn; None: greedy."""
        if self.uniforms_ST is None:
            return None
        return self.uniforms_ST.index_select(1, self.last_1).squeeze(1)

    def read(self, start: int, end: int, end_ids: list[int]) -> None:
        """Copy tokens ``start`` to ``end`` to the rows that go on. The host waits for them.

        Rows that drew one of ``end_ids`` have ended.
        """
        tokens = self.tokens_ST[:, start:end].tolist()
        logprobs = self.logprobs_ST[:, start:end].tolist()
        for slot, row in enumerate(self.rows):
            for token, logprob in zip(tokens[slot], logprobs[slot], strict=True):
                if row.finished:
                    break
                row.append(token, logprob)
                row.finished = token in end_ids

    def keep(self, slots: list[int]) -> None:
        """Drop all rows but these."""
        self.cache = None  # frees the keys and values of the prompts before they are copied
        index_S = self.last_1.new_tensor(slots)
        self.decoder.keep_rows(index_S)
        self.rows = [self.rows[slot] for slot in slots]
        self.tokens_ST = self.tokens_ST[index_S]
        self.logprobs_ST = self.logprobs_ST[index_S]
        if self.uniforms_ST is not None:
            self.uniforms_ST = self.uniforms_ST[index_S]


class FixedWidthCache(ForkedCache):
    """A KV cache for captured steps, which attend to ``width`` own tokens.

    The device counts the tokens that are computed, and masks the others.
    """

    def __init__(
        self,
        cache: ForkedCache,
        last_1: Tensor,
        width: int,
    ):
        """Share the tensors of ``cache``. ``last_1``: index of the token that is being computed."""
        vars(self).update(vars(cache))
        self.use_cpu_kernel = False
        self.last_1 = last_1
        self.index_C = torch.arange(width, device=last_1.device)
        self.length = width
        # What is masked counts 0 times its value, and memory without tokens may hold NaN.
        for buffers in self.own.values():
            for buffer in buffers:
                buffer[:, :, cache.length : width] = 0

    def begin_token(self) -> None:
        is_later_C = self.index_C > self.last_1
        self.own_bias = additive_mask(is_later_C[None], self.dtype)

    def _store_token(
        self,
        layer: int,
        k_RK1D: Tensor,
        v_RK1D: Tensor,
    ) -> None:
        keys, values = self.own[layer]
        keys.index_copy_(2, self.last_1, k_RK1D)
        values.index_copy_(2, self.last_1, v_RK1D)

"""Decode steps as CUDA graphs: a step is captured, and then replayed by one launch for each token.

Launching the hundreds of small kernels of a decode step takes longer than running them, and reading at every token
which rows have ended makes the device wait for the host. A captured step reads and writes the tensors that it was
captured with, so no shape changes between two reads: rows that have ended go on, and a step attends to a fixed number
of own tokens, of which later ones are masked. Every ``SYNC_EVERY`` tokens the host reads what was drawn. When half of
the rows have ended, or the tokens reach that number, the next step is captured anew.

Graphs belong to one wave of rows, whose KV cache and copies of weights they read; the memory pool of the last one
outlives it. Tokens differ from those of :mod:`grpo.rollout.decode_loop` by rounding alone.

An H100 has run this (``benchmarks/results/h100.md``). Tests capture and replay the steps on an emulated CUDA device
(``tests/cuda/``), and run them on the CPU without graphs.

Shapes: ``S`` rows that are decoded together, ``R`` rows at the start, ``T`` most tokens of a completion, ``C`` own
tokens that a step attends to, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from grpo.attention import ForkedCache, fast_paths, forked_hidden
from grpo.attention.forked import additive_mask
from grpo.model import Policy
from grpo.rollout.decode_loop import Decoded
from grpo.rollout.draw import SamplingParams, draw
from grpo.rollout.prefill import ForkedCacheDecoder
from grpo.rollout.stops import Stops

SYNC_EVERY = 8
"""Decode steps between two reads of which rows have ended."""
OWN_BUCKET = 256
"""The number of own tokens that a step attends to is a multiple of this."""
LEAST_LIMIT = {"fp32": 0.003, "bf16": 0.03}
"""Shares of the logits' standard deviation by which a replay may always differ, however little rounding is measured."""


class CUDAGraphRunner:
    """Decodes batches by captured steps. ``capture=False`` runs the same steps without graphs, on any device."""

    def __init__(self, policy: Policy, *, capture: bool = True):
        self.policy, self.capture = policy, capture
        self.verified: set[bool] = set()
        """The kinds of sampling (whether it is greedy) for which replayed steps have agreed with the decode loop's."""
        self._graph: torch.cuda.CUDAGraph | None = None
        """The last graph: it keeps the memory pool, which the next one takes."""
        self._stream = torch.cuda.Stream(policy.device) if capture else None

    def decode(
        self,
        decoder: ForkedCacheDecoder,
        logits_RV: Tensor,
        uniforms_RT: Tensor | None,
        sampling: SamplingParams,
        on_tokens: Callable[[int], None] | None,
    ) -> Decoded:
        """Decode every row to its end, from what the prefill returned; see :func:`grpo.rollout.decode_loop.decode`.

        RuntimeError if a replayed step computes other logits than the decode loop's, or as PyTorch's capture raises it.
        """
        T, stops = sampling.max_completion_length, Stops(self.policy, sampling.stop)
        end_ids, decoded = torch.tensor(stops.ids), Decoded.empty(len(logits_RV), T)
        batch = _Batch(decoder, uniforms_RT, sampling)
        batch.draw(logits_RV)
        start, t, shape = 0, 1, None  # tokens of each row that the host has read; tokens that are drawn, or queued
        needs_check = sampling.is_greedy not in self.verified
        while True:
            batch.read(start, t, end_ids, decoded)
            live = [slot for slot, row in enumerate(batch.rows) if not decoded.finished[row]]
            goes_on = bool(live) and t < T
            if goes_on:
                if 2 * len(live) <= len(batch.rows):
                    replay = step = None  # frees the KV cache of all rows before it is copied
                    batch.keep(live, t - 1)
                count = left = min(SYNC_EVERY, T - t)
                width = min(-(-(t + count - 1) // OWN_BUCKET) * OWN_BUCKET, T)
                if shape != (len(batch.rows), width):
                    # ``step`` is kept because its graph reads tensors that it alone holds.
                    shape, step = (len(batch.rows), width), batch.make_step(width, t - 1)
                    replay, left = self._captured(step, batch), left - 1
                if needs_check and left:
                    self._check(replay, batch, t + count - left - 1)
                    left -= 1
                for _ in range(left):
                    replay()
            # The device computes the next tokens while the host looks for stop strings in these.
            for row, length in enumerate(decoded.lengths if stops.strings else ()):
                first = max(start + 1 - stops.span, 0)
                tokens = decoded.tokens_RT[row, first : min(t, length)].tolist()
                if length > start and (stop := stops.first_end(tokens, start - first)):
                    decoded.lengths[row], decoded.finished[row] = first + stop, True
            if on_tokens is not None:
                on_tokens(sum(max(min(t, length) - start, 0) for length in decoded.lengths))
            if not goes_on:
                break
            start, t = t, t + count
        return decoded

    def _captured(self, step: Callable[[], None], batch: _Batch) -> Callable[[], None]:
        """Run the step once, which draws a token, then capture it in a graph, which does not; returns its replay."""
        if not self.capture:
            step()
            return step
        if fast_paths.is_on(fast_paths.STEP):
            batch.compile_ahead(step)  # a compiler may wait for the device
        # A host sync cannot be captured. Its error is easier to recover from here than in the capture.
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        graph, pool = torch.cuda.CUDAGraph(), None if self._graph is None else self._graph.pool()
        # "thread_local": NCCL's threads may call CUDA meanwhile. (The thread that saves does not.)
        capture = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.stream(self._stream), capture:  # if the capture ends with an error, only the first restores
            step()
        self._graph = graph
        return graph.replay

    def _check(self, replay: Callable[[], None], batch: _Batch, num_own: int) -> None:
        """Replay one step, and compute it again without :mod:`fast_paths`, from token ``num_own`` of each row.

        RuntimeError if logits differ by more than rounding (measured: the loop's step against the model's own modules),
        or if other tokens or log-probs are recorded than these logits give.
        """
        replay()  # first: it must not read the keys and values that the other steps store
        drawn = draw(batch.logits_SV, batch.uniforms(batch.token_S.new_tensor([num_own + 1])), batch.sampling)
        recorded = batch.tokens_ST[:, num_own + 1], batch.logprobs_ST[:, num_own + 1]
        decoder, cache = batch.decoder, batch.decoder.cache
        token_S, positions_S = batch.tokens_ST[:, num_own], cache.prompt_lengths_U[cache.prompt_R] + num_own
        buffers = [buffer[:, :, num_own] for pair in cache.own.values() for buffer in pair]
        stored = [buffer.clone() for buffer in buffers]
        logits = []
        for hidden_of_token in (decoder.hidden_of_token, partial(forked_hidden, self.policy.backbone)):
            cache.length = num_own
            with fast_paths.only():
                logits.append(decoder.head(hidden_of_token(token_S, positions_S, cache)).float())
        for buffer, of_replay in zip(buffers, stored, strict=True):  # a run without this check has the same bits
            buffer.copy_(of_replay)
        expected_SV, other_SV = logits
        error_S, noise_S = ((x_SV - expected_SV).std(dim=-1) for x_SV in (batch.logits_SV.float(), other_SV))
        limit = torch.maximum(4 * noise_S.mean(), LEAST_LIMIT[self.policy.precision] * expected_SV.std(dim=-1).mean())
        agrees = bool(error_S.mean() <= limit) and bool(error_S.max() <= 5 * limit)
        if not agrees or not all(map(torch.equal, drawn, recorded)):
            raise RuntimeError("they give other results than the same steps without graphs")
        self.verified.add(batch.sampling.is_greedy)


class _Batch:
    """The rows that are decoded together, in tensors that captured steps read and write."""

    def __init__(self, decoder: ForkedCacheDecoder, uniforms_RT: Tensor | None, sampling: SamplingParams):
        self.decoder, self.uniforms_ST, self.sampling = decoder, uniforms_RT, sampling
        S, T, device = len(decoder.positions_R), sampling.max_completion_length, decoder.positions_R.device
        self.rows = list(range(S))
        """The number of each row in the rollout."""
        self.next_1 = torch.zeros(1, dtype=torch.long, device=device)
        """Index of the next token, the same for all rows."""
        self.token_S = torch.zeros(S, dtype=torch.long, device=device)
        """The tokens drawn last."""
        self.tokens_ST, self.logprobs_ST = self.token_S.new_zeros(S, T), torch.zeros(S, T, device=device)
        self.logits_SV: Tensor | None = None
        """From which a step drew the last tokens."""

    def make_step(self, width: int, num_own: int) -> Callable[[], None]:
        """A decode step that attends to ``width`` own tokens, of which ``num_own`` are computed."""
        self.logits_SV = None  # in the pool of graphs, where the next one may use its memory
        decoder, positions_S = self.decoder, self.decoder.positions_R
        decoder.cache.length = num_own
        cache = FixedWidthCache(decoder.cache, self.next_1, width)

        def step() -> None:
            hidden_SH = decoder.hidden_of_token(self.token_S, positions_S, cache)
            positions_S.add_(1)
            self.logits_SV = decoder.head(hidden_SH)
            self.draw(self.logits_SV)

        return step

    def compile_ahead(self, step: Callable[[], None]) -> None:
        """Run a step and forget the token that it has drawn. The next run stores the same keys and values again."""
        token_S = self.token_S.clone()
        step()
        self.token_S.copy_(token_S)
        for counter in (self.next_1, self.decoder.positions_R):
            counter.sub_(1)

    def draw(self, logits_SV: Tensor) -> None:
        """Draw the next token of every row, without a host sync."""
        token_S, logprob_S = draw(logits_SV, self.uniforms(self.next_1), self.sampling)
        self.tokens_ST.index_copy_(1, self.next_1, token_S[:, None])
        self.logprobs_ST.index_copy_(1, self.next_1, logprob_S[:, None])
        self.token_S.copy_(token_S)
        self.next_1.add_(1)

    def uniforms(self, index_1: Tensor) -> Tensor | None:
        return None if self.uniforms_ST is None else self.uniforms_ST.index_select(1, index_1).squeeze(1)

    def read(self, start: int, end: int, end_ids: Tensor, decoded: Decoded) -> None:
        """Copy the tokens of these numbers to the host, which waits for them, and end the rows that drew an end."""
        tokens_SN = self.tokens_ST[:, start:end].cpu()
        decoded.tokens_RT[self.rows, start:end] = tokens_SN
        decoded.logprobs_RT[self.rows, start:end] = self.logprobs_ST[:, start:end].cpu()
        for slot, token in torch.isin(tokens_SN, end_ids).nonzero().tolist():
            if not decoded.finished[row := self.rows[slot]]:
                decoded.lengths[row], decoded.finished[row] = start + token + 1, True

    def keep(self, slots: list[int], num_own: int) -> None:
        """Drop all rows but these, of which ``num_own`` own tokens are in the cache."""
        index_S = torch.tensor(slots, device=self.token_S.device)
        self.decoder.cache.length = num_own
        self.decoder.keep_rows(index_S)
        self.rows = [self.rows[slot] for slot in slots]
        self.token_S, self.tokens_ST, self.logprobs_ST = (
            x[index_S] for x in (self.token_S, self.tokens_ST, self.logprobs_ST)
        )
        if self.uniforms_ST is not None:
            self.uniforms_ST = self.uniforms_ST[index_S]


class FixedWidthCache(ForkedCache):
    """A cache as captured steps see it, which attend to ``width`` own tokens; the device counts those computed."""

    def __init__(self, cache: ForkedCache, next_1: Tensor, width: int):
        """Shares what ``cache`` holds. ``next_1``: index of the token to be drawn; keys go to the index before."""
        vars(self).update(vars(cache))
        self.use_cpu_kernel, self.next_1 = False, next_1
        self.index_C = torch.arange(width, device=next_1.device)
        for layer, (keys_UKPD, _) in cache.prompts.items():
            if layer not in cache.own:
                shape = (len(cache.prompt_R), keys_UKPD.shape[1], cache.capacity, keys_UKPD.shape[3])
                cache.own[layer] = tuple(keys_UKPD.new_empty(shape) for _ in range(2))
            for buffer in cache.own[layer]:
                buffer[:, :, cache.length : width] = 0.0  # masked, but 0 times uninitialised memory could be NaN
        self.own, self.length = cache.own, width

    def begin_token(self) -> None:
        self.index_1 = self.next_1 - 1
        self.own_bias = additive_mask((self.index_C >= self.next_1)[None], self.dtype)

    def _store_token(self, layer: int, k_RK1D: Tensor, v_RK1D: Tensor) -> None:
        for buffer, x_RK1D in zip(self.own[layer], (k_RK1D, v_RK1D), strict=True):
            buffer.index_copy_(2, self.index_1, x_RK1D)

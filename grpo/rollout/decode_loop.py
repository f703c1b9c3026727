"""The decode loop with continuous batching: rows leave the batch when they have ended, and waiting rows take their
places.

Shapes: ``R`` rows (completions), ``B`` rows in the batch, ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from grpo.algorithm.batch import AllowedTokens
from grpo.attention import packing_enabled
from grpo.model import Policy
from grpo.rollout.draw import SamplingParams, draw, draw_and_record
from grpo.rollout.prefill import DynamicCacheDecoder, ForkedCacheDecoder
from grpo.rollout.stops import Stops

SPARE_SHARE = 8
"""If rows join later, the KV cache has T/8 more slots per row, so that it is compacted less often."""

Prompts = Sequence[tuple[int, ...]]
"""The prompt of each row. Rows of one group are neighbours."""
Decoder = ForkedCacheDecoder | DynamicCacheDecoder
Prefill = Callable[[Prompts, int], tuple[Decoder, torch.Tensor]]
"""From prompts and capacity, a decoder and the logits of each row's first token (:mod:`grpo.rollout.prefill`)."""


class Decoded(NamedTuple):
    """On the CPU: tokens and log-probs ``[R, T]``, each row's length, and whether it ended before it was cut."""

    tokens_RT: torch.Tensor
    logprobs_RT: torch.Tensor
    lengths: list[int]
    finished: list[bool]
    allowed: list[AllowedTokens] | None = None
    """Of each row, with ``sampling.records_allowed``."""


class DecodeLoop:
    """Decodes rows to their ends, as many at once as ``tokens_in_flight`` allows.

    A row waits until :meth:`admit` puts it into the batch. It is live until it ends, and remains in the batch, without
    effect, until :meth:`retire` takes it out. Waiting rows start as soon as ended rows have freed memory for a whole
    group. In the cache of models that cannot be packed, all rows must have started together: there waiting rows start
    when all others have ended.
    """

    def __init__(self, policy: Policy, prefill: Prefill, prompts: Prompts, uniforms_RT, sampling: SamplingParams):
        """``uniforms_RT``: the uniform number that draws each token, on the policy's device; None: greedy."""
        self.policy, self.prefill, self.prompts = policy, prefill, prompts
        self.uniforms_RT, self.sampling = uniforms_RT, sampling
        R, T, device = len(prompts), sampling.max_completion_length, policy.device
        self.stops = Stops(policy.tokenizer, sampling.stop)
        self.eos_E = torch.tensor([*policy.eos_ids, *self.stops.ids], device=device)
        self.tokens_RT, self.logprobs_RT = torch.zeros(R, T, dtype=torch.long), torch.zeros(R, T)
        self.lengths, self.finished = [T] * R, [False] * R
        self.allowed_ids: list[list[torch.Tensor]] = [[] for _ in prompts]
        """Of each row, the ids allowed at each of its tokens, with ``sampling.records_allowed``."""

        self.rows_can_join, self.capacity = packing_enabled(policy.model), T
        if self.rows_can_join and num_admissible(prompts, [], 0, sampling, T) < R:
            self.capacity += T // SPARE_SHARE + 1
        self.num_started = 0  # rows start in order
        self.num_live = 0
        self.memory_was_freed = True  # whether rows have ended since the last admission
        self.decoder: Decoder | None = None
        self.rows_B: list[int] = []
        self.t_B = torch.zeros(0, dtype=torch.long)  # index of each row's next token
        self.live_B = torch.ones(0, dtype=torch.bool, device=device)
        self.logits_BV = torch.zeros(0, 0, device=device)  # of each row's next token
        self.token_B = torch.zeros(0, dtype=torch.long, device=device)  # drawn last

    def run(self, on_tokens: Callable[[int], None] | None = None) -> Decoded:
        """Decode every row; ``on_tokens`` is called with the number of tokens drawn since its last call."""
        while self.admit():
            num_tokens = self.draw_tokens()
            if on_tokens is not None:
                on_tokens(num_tokens)
            if self.num_live:
                self.retire()
                self.compute_logits()
        allowed = None
        if self.sampling.records_allowed:
            allowed = [_joined(ids_T[:length]) for ids_T, length in zip(self.allowed_ids, self.lengths, strict=True)]
        return Decoded(self.tokens_RT, self.logprobs_RT, self.lengths, self.finished, allowed)

    def admit(self) -> bool:
        """Start waiting rows, if memory allows it. Returns whether any row is live."""
        has_waiting = self.num_started < len(self.prompts)
        if has_waiting and self.memory_was_freed and (self.rows_can_join or self.num_live == 0):
            live = self.live_B.nonzero().flatten()
            live_rows = [self.rows_B[b] for b in live.tolist()]
            if count := num_admissible(self.prompts, live_rows, self.num_started, self.sampling, self.capacity):
                self._start(count, live, live_rows)
        return self.num_live > 0

    def _start(self, count: int, live: torch.Tensor, live_rows: list[int]) -> None:
        """Prefill the next rows and put them behind the live ones, of which ``live`` are the indices in the batch."""
        new_rows = range(self.num_started, self.num_started + count)
        decoder, logits_NV = self.prefill([self.prompts[row] for row in new_rows], self.capacity)
        if live_rows:
            self.decoder.keep_rows(live)
            self.decoder.add_rows(decoder)
            self.logits_BV = torch.cat([self.logits_BV[live], logits_NV])
        else:
            self.decoder, self.logits_BV = decoder, logits_NV
        self.rows_B = [*live_rows, *new_rows]
        self.t_B = torch.cat([self.t_B[live.cpu()], torch.zeros(count, dtype=torch.long)])
        self.num_live = len(self.rows_B)
        self.live_B = torch.ones(self.num_live, dtype=torch.bool, device=self.policy.device)
        self.num_started += count

    def draw_tokens(self) -> int:
        """Draw the next token of every row, and mark the rows that end. Returns the number of rows live before."""
        T = self.sampling.max_completion_length
        u_B = None if self.uniforms_RT is None else self.uniforms_RT[self.rows_B, self.t_B]
        if self.sampling.records_allowed:
            self.token_B, logprob_B, allowed_BV = draw_and_record(self.logits_BV, u_B, self.sampling)
            ids_K = allowed_BV.nonzero()[:, 1].int().cpu()
            for row, ids_k in zip(self.rows_B, ids_K.split(allowed_BV.sum(dim=1).tolist()), strict=True):
                self.allowed_ids[row].append(ids_k)
        else:
            self.token_B, logprob_B = draw(self.logits_BV, u_B, self.sampling)
        self.tokens_RT[self.rows_B, self.t_B] = self.token_B.cpu()
        self.logprobs_RT[self.rows_B, self.t_B] = logprob_B.cpu()
        finished_B = torch.isin(self.token_B, self.eos_E) & self.live_B
        if self.stops.strings:
            ends = zip(self.rows_B, (self.t_B + 1).tolist(), strict=True)
            tails = [self.tokens_RT[row, max(end - self.stops.span, 0) : end].tolist() for row, end in ends]
            has_stop_B = [self.stops.first_end(tail, len(tail) - 1) is not None for tail in tails]
            finished_B |= torch.tensor(has_stop_B, device=finished_B.device) & self.live_B
        for b in finished_B.nonzero().flatten().tolist():
            row = self.rows_B[b]
            self.lengths[row], self.finished[row] = int(self.t_B[b]) + 1, True
        self.live_B = self.live_B & ~finished_B
        is_cut_B = self.t_B == T - 1
        if bool(is_cut_B.any()):
            self.live_B = self.live_B & ~is_cut_B.to(self.live_B.device)
        num_before, self.num_live = self.num_live, int(self.live_B.sum())
        self.memory_was_freed = self.num_live < num_before
        return num_before

    def retire(self) -> None:
        """Take ended rows out of the batch, which copies the cache, if they are an eighth of the batch or the cache is
        full.

        Also if a row has drawn its last allowed token: it has no further random number, and its next position may
        exceed the context.
        """
        num_ended, T = len(self.rows_B) - self.num_live, self.sampling.max_completion_length
        if num_ended >= max(len(self.rows_B) // 8, 1) or self.decoder.is_full or int(self.t_B.max()) == T - 1:
            live = self.live_B.nonzero().flatten()
            self.decoder.keep_rows(live)
            self.rows_B = [self.rows_B[b] for b in live.tolist()]
            self.token_B, self.live_B, self.t_B = self.token_B[live], self.live_B[live], self.t_B[live.cpu()]

    def compute_logits(self) -> None:
        """One forward pass over the tokens drawn last, for the logits of each row's next token."""
        self.logits_BV = self.decoder.step(self.token_B)
        self.t_B = self.t_B + 1


def _joined(ids_T: list[torch.Tensor]) -> AllowedTokens:
    return AllowedTokens(torch.cat(ids_T), torch.tensor([len(ids_k) for ids_k in ids_T], dtype=torch.int32))


def num_admissible(prompts: Prompts, in_flight: list[int], num_started: int, sampling, capacity: int) -> int:
    """The number of waiting rows that may start beside those in flight, so that at most ``tokens_in_flight`` tokens are
    in the cache.

    Each row counts as many tokens as the longest prompt of all these rows plus ``capacity``. Only whole groups start.
    If nothing is in flight and not even one group fits, a part of the group starts, and at least one row.
    """
    R, bound = len(prompts), sampling.tokens_in_flight
    if bound is None:
        return R - num_started
    longest, end = max((len(prompts[row]) for row in in_flight), default=0), num_started
    while end < R and (len(in_flight) + end + 1 - num_started) * (max(longest, len(prompts[end])) + capacity) <= bound:
        longest = max(longest, len(prompts[end]))
        end += 1
    end_of_group = end
    while num_started < end_of_group < R and prompts[end_of_group] == prompts[end_of_group - 1]:
        end_of_group -= 1
    if end_of_group > num_started or in_flight:
        return end_of_group - num_started
    return max(end - num_started, 1)

"""The decode loop with continuous batching: rows leave the batch when they end, and waiting rows take their places.

Shapes: ``R`` rows (completions), ``B`` rows in the batch, ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.algorithm.batch import AllowedTokens
from grpo.attention import packing_enabled
from grpo.model import Policy
from grpo.rollout.draw import SamplingParams, draw, draw_and_record
from grpo.rollout.prefill import DynamicCacheDecoder, ForkedCacheDecoder
from grpo.rollout.stops import Stops

MARGIN_SHARE = 8
"""If rows join later, the KV cache has T/8 more slots per row, so that it is compacted less often."""

Prompts = Sequence[tuple[int, ...]]
"""The prompt of each row. Rows of one group are neighbours."""
Decoder = ForkedCacheDecoder | DynamicCacheDecoder
Prefill = Callable[[Prompts, int], tuple[Decoder, Tensor]]
"""From prompts and capacity, a decoder and the logits of each row's first token (:mod:`grpo.rollout.prefill`)."""


class Decoded(NamedTuple):
    """On the CPU: tokens and log-probs ``[R, T]``, each row's length, and whether it ended before it was cut."""

    tokens_RT: Tensor
    logprobs_RT: Tensor
    lengths: list[int]
    finished: list[bool]
    allowed: list[AllowedTokens] | None = None
    """Of each row, with ``sampling.records_allowed``."""

    @classmethod
    def empty(cls, R: int, T: int) -> Decoded:
        return cls(torch.zeros(R, T, dtype=torch.long), torch.zeros(R, T), [T] * R, [False] * R)


def decode(
    policy: Policy,
    prefill: Prefill,
    prompts: Prompts,
    uniforms_RT: Tensor | None,
    sampling: SamplingParams,
    on_tokens: Callable[[int], None] | None = None,
) -> Decoded:
    """Decode every row to its end, as many at once as ``tokens_in_flight`` allows.

    Waiting rows start as soon as ended rows have freed memory for a whole group; in the cache of models that cannot be
    packed, rows must start together: when all others have ended. ``uniforms_RT`` draw the tokens, on the policy's
    device; None: greedy. ``on_tokens`` is called with the number of tokens drawn since its last call.
    """
    R, T, device = len(prompts), sampling.max_completion_length, policy.device
    stops, decoded = Stops(policy, sampling.stop), Decoded.empty(R, T)
    end_ids = torch.tensor(stops.ids)
    allowed_ids: list[list[Tensor]] = [[] for _ in prompts]  # of each row and token
    rows_can_join, capacity = packing_enabled(policy.model), T
    if rows_can_join and num_admissible(prompts, [], 0, sampling, T) < R:
        capacity += T // MARGIN_SHARE + 1
    rows_B, live_B = [], torch.ones(0, dtype=torch.bool)  # an ended row is not live, and remains until it is taken out
    t_B = torch.zeros(0, dtype=torch.long)  # index of each row's next token
    decoder = logits_BV = None
    num_started, memory_was_freed = 0, True
    while True:
        live = live_B.nonzero().flatten()
        if num_started < R and memory_was_freed and (rows_can_join or not len(live)):
            live_rows = [rows_B[b] for b in live.tolist()]
            if count := num_admissible(prompts, live_rows, num_started, sampling, capacity):
                new_rows = range(num_started, num_started + count)
                new_decoder, new_logits_NV = prefill([prompts[row] for row in new_rows], capacity)
                if live_rows:
                    decoder.keep_rows(live.to(device))
                    decoder.add_rows(new_decoder)
                    logits_BV = torch.cat([logits_BV[live.to(device)], new_logits_NV])
                else:
                    decoder, logits_BV = new_decoder, new_logits_NV
                del new_decoder, new_logits_NV  # whose keys and values have been copied
                num_started += count
                rows_B, t_B = [*live_rows, *new_rows], torch.cat([t_B[live], t_B.new_zeros(count)])
                live_B = torch.ones(len(rows_B), dtype=torch.bool)
        num_live = int(live_B.sum())
        if not num_live:
            break

        u_B = None if uniforms_RT is None else uniforms_RT[rows_B, t_B]
        if sampling.records_allowed:
            token_B, logprob_B, allowed_BV = draw_and_record(logits_BV, u_B, sampling)
            ids_K = allowed_BV.nonzero()[:, 1].int().cpu()
            for row, ids_k in zip(rows_B, ids_K.split(allowed_BV.sum(dim=1).tolist()), strict=True):
                allowed_ids[row].append(ids_k)
        else:
            token_B, logprob_B = draw(logits_BV, u_B, sampling)
        drawn_B = token_B.cpu()
        decoded.tokens_RT[rows_B, t_B], decoded.logprobs_RT[rows_B, t_B] = drawn_B, logprob_B.cpu()
        finished_B = torch.isin(drawn_B, end_ids)
        if stops.strings:
            ends = zip(rows_B, (t_B + 1).tolist(), strict=True)
            tails = [decoded.tokens_RT[row, max(end - stops.span, 0) : end].tolist() for row, end in ends]
            finished_B |= torch.tensor([stops.first_end(tail, len(tail) - 1) is not None for tail in tails])
        for b in (finished_B & live_B).nonzero().flatten().tolist():
            decoded.lengths[rows_B[b]], decoded.finished[rows_B[b]] = int(t_B[b]) + 1, True
        live_B &= ~finished_B & (t_B < T - 1)
        live = live_B.nonzero().flatten()
        memory_was_freed = len(live) < num_live
        if on_tokens is not None:
            on_tokens(num_live)
        if not len(live):
            continue
        # Taking rows out copies the cache. A row that has drawn its last token of T must go: it has no further random
        # number, and its next position may exceed the context.
        num_ended = len(rows_B) - len(live)
        if num_ended >= max(len(rows_B) // 8, 1) or decoder.is_full or int(t_B.max()) == T - 1:
            decoder.keep_rows(live.to(device))
            rows_B, t_B, live_B = [rows_B[b] for b in live.tolist()], t_B[live], live_B[live]
            token_B = token_B[live.to(device)]
        logits_BV, t_B = decoder.step(token_B), t_B + 1
    if not sampling.records_allowed:
        return decoded
    allowed_R = [ids_T[:length] for ids_T, length in zip(allowed_ids, decoded.lengths, strict=True)]
    counts_R = [torch.tensor([len(ids_k) for ids_k in ids_T], dtype=torch.int32) for ids_T in allowed_R]
    return decoded._replace(allowed=[AllowedTokens(torch.cat(i), n) for i, n in zip(allowed_R, counts_R, strict=True)])


def num_admissible(prompts: Prompts, in_flight: list[int], num_started: int, sampling, capacity: int) -> int:
    """The number of waiting rows that may start beside those in flight, under ``tokens_in_flight`` tokens of KV cache.

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

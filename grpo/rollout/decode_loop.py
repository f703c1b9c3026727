"""The decode loop with continuous batching: rows leave the batch when they end, and waiting rows take their places.

With tools a row also leaves at the end of a turn, and comes back with the answer, which enters its KV cache by one
forward pass. Answers are waited for when half of the rows in flight have left: which rows share a batch, and with it
every bit, then depends on the tokens alone, not on how long a tool takes.

Shapes: ``R`` rows (completions), ``B`` rows in the batch, ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.algorithm.batch import AllowedTokens
from grpo.attention import packing_enabled
from grpo.model import Policy
from grpo.rollout.draw import SamplingParams, draw, draw_and_record
from grpo.rollout.interface import Replies
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
    is_answer_RT: Tensor
    """True at the tokens that a tool or environment answered, whose log-prob is 0."""
    allowed: list[AllowedTokens] | None = None
    """Of each row, with ``sampling.records_allowed``."""

    @classmethod
    def empty(cls, R: int, T: int) -> Decoded:
        is_answer_RT = torch.zeros(R, T, dtype=torch.bool)
        return cls(torch.zeros(R, T, dtype=torch.long), torch.zeros(R, T), [T] * R, [False] * R, is_answer_RT)


def decode(
    policy: Policy,
    prefill: Prefill,
    prompts: Prompts,
    uniforms_RT: Tensor | None,
    sampling: SamplingParams,
    on_tokens: Callable[[int], None] | None = None,
    replies: Replies | None = None,
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
    away = RowsAway(prefill, prompts, decoded, capacity, rows_can_join)
    turn_starts = [0] * R  # index of the first token of each row's turn

    def join(new_decoder: Decoder, new_logits_NV: Tensor, new_rows: Sequence[int], new_t: Sequence[int]) -> None:
        nonlocal decoder, logits_BV, rows_B, t_B, live_B
        live = live_B.nonzero().flatten()
        live_rows = [rows_B[b] for b in live.tolist()]
        if live_rows:
            decoder.keep_rows(live.to(device))
            decoder.add_rows(new_decoder)
            logits_BV = torch.cat([logits_BV[live.to(device)], new_logits_NV])
        else:
            decoder, logits_BV = new_decoder, new_logits_NV
        rows_B, t_B = [*live_rows, *new_rows], torch.cat([t_B[live], torch.tensor(new_t, dtype=torch.long)])
        live_B = torch.ones(len(rows_B), dtype=torch.bool)

    while True:
        live = live_B.nonzero().flatten()
        if away.rows and len(away.rows) >= len(live) and (rows_can_join or not len(live)):
            num_away = len(away.rows)
            new_rows, answers, *new = away.come_back()
            for row, answer in answers.items():
                sampled = allowed_ids[row][: away.ends[row] - len(answer)]  # a row may draw until it is taken out
                allowed_ids[row] = sampled + [torch.empty(0, dtype=torch.int32)] * len(answer)
                turn_starts[row] = away.ends[row]
            if new_rows:
                join(*new, new_rows, [turn_starts[row] for row in new_rows])
            del new  # whose keys and values have been copied
            memory_was_freed |= len(new_rows) < num_away
            live = live_B.nonzero().flatten()
        if num_started < R and memory_was_freed and (rows_can_join or not len(live)):
            in_flight = [*(rows_B[b] for b in live.tolist()), *away.rows]
            if count := num_admissible(prompts, in_flight, num_started, sampling, capacity):
                new_rows = range(num_started, num_started + count)
                join(*prefill([prompts[row] for row in new_rows], capacity), new_rows, [0] * count)
                num_started += count
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
            for b, row in enumerate(rows_B):
                end = int(t_B[b]) + 1
                first = max(end - stops.span, turn_starts[row])
                finished_B[b] |= stops.has_stop(decoded.tokens_RT[row, first:end].tolist())
        ended = (finished_B & live_B).nonzero().flatten()
        for b in ended.tolist():
            row = rows_B[b]
            decoded.lengths[row] = int(t_B[b]) + 1
            decoded.finished[row] = True
        live_B &= ~finished_B & (t_B < T - 1)
        if replies is not None and len(ended):
            away.leave(decoder, ended, [rows_B[b] for b in ended.tolist()], turn_starts, replies)
        live = live_B.nonzero().flatten()
        memory_was_freed = len(live) + (0 if replies is None else len(ended)) < num_live
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
    allowed = []
    for ids_T, length in zip(allowed_ids, decoded.lengths, strict=True):
        counts_T = torch.tensor([len(ids_k) for ids_k in ids_T[:length]], dtype=torch.int32)
        allowed.append(AllowedTokens(torch.cat(ids_T[:length]), counts_T))
    return decoded._replace(allowed=allowed)


class RowsAway:
    """The rows that have ended a turn and wait for an answer, with their keys and values.

    In the cache of models that cannot be packed rows cannot join, so theirs are computed again with the answer.
    """

    def __init__(self, prefill: Prefill, prompts: Prompts, decoded: Decoded, capacity: int, rows_can_join: bool):
        self.prefill, self.prompts, self.decoded, self.capacity = prefill, prompts, decoded, capacity
        self.rows_can_join = rows_can_join
        self.rows: list[int] = []
        self.ends: dict[int, int] = {}
        """The number of tokens of each row that has been away, with the newest answer."""
        self._answers: list[Future[Sequence[int] | None]] = []
        self._decoder: Decoder | None = None

    def leave(
        self, decoder: Decoder, positions: Tensor, rows: list[int], turn_starts: list[int], replies: Replies
    ) -> None:
        """Take over rows of the batch, at these positions in the decoder, and ask for their answers."""
        if self.rows_can_join:
            part = decoder.split(positions.to(decoder.positions_R.device))
            if self.rows:
                self._decoder.add_rows(part)
            else:
                self._decoder = part
        for row in rows:
            turn = self.decoded.tokens_RT[row, turn_starts[row] : self.decoded.lengths[row]]
            self._answers.append(replies(row, turn.tolist()))
        self.rows += rows

    def come_back(self) -> tuple[list[int], dict[int, Sequence[int]], Decoder | None, Tensor | None]:
        """Wait for all answers, and append them: the rows that go on, their answers, decoder and logits."""
        found = zip(self.rows, self._answers, strict=True)
        answers = {row: answer for row, future in found if (answer := future.result()) is not None}
        going_on, rows = [i for i, row in enumerate(self.rows) if row in answers], list(answers)
        decoder, self._decoder, self.rows, self._answers = self._decoder, None, [], []
        if not rows:
            return [], {}, None, None
        d, T, last_tokens = self.decoded, self.decoded.tokens_RT.shape[1], {}
        for row, answer in answers.items():
            end = d.lengths[row]
            last_tokens[row], self.ends[row] = int(d.tokens_RT[row, end - 1]), end + len(answer)
            assert self.ends[row] < T, "an answer leaves no room for another turn"
            d.tokens_RT[row, end : self.ends[row]] = torch.tensor(answer)
            d.logprobs_RT[row, end : self.ends[row]], d.is_answer_RT[row, end : self.ends[row]] = 0.0, True
            d.lengths[row], d.finished[row] = T, False  # until another turn ends
        if self.rows_can_join:  # the last token of the turn has been drawn, and not been computed
            decoder.keep_rows(torch.tensor(going_on, device=decoder.positions_R.device))
            return rows, answers, decoder, decoder.extend([(last_tokens[row], *answers[row]) for row in rows])
        prefixes = [(*self.prompts[row], *d.tokens_RT[row, : self.ends[row]].tolist()) for row in rows]
        return rows, answers, *self.prefill(prefixes, self.capacity)


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

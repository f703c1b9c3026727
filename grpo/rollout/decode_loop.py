"""The decode loop with continuous batching: rows leave the batch when they end, and waiting rows take their places.

With tools a row also leaves at the end of a turn, and comes back with the answer, which enters its KV cache by one
forward pass. Answers are waited for when half of the rows in flight have left: which rows share a batch, and with it
every bit, then depends on the tokens alone, not on how long a tool takes.

Shapes: ``R`` rows (completions), ``B`` rows in the batch, ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.algorithm.batch import AllowedTokens
from grpo.attention import packing_enabled
from grpo.model import Policy
from grpo.rollout.draw import SamplingParams, draw_and_record
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
        return cls(
            tokens_RT=torch.zeros(R, T, dtype=torch.long),
            logprobs_RT=torch.zeros(R, T),
            lengths=[T] * R,
            finished=[False] * R,
            is_answer_RT=torch.zeros(R, T, dtype=torch.bool),
        )


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
    R = len(prompts)
    T = sampling.max_completion_length
    stops = Stops(policy, sampling.stop)
    end_ids = set(stops.ids)
    decoded = Decoded.empty(R, T)
    none_allowed = torch.empty(0, dtype=torch.int32)
    allowed_ids = [[none_allowed] * T for _ in prompts] if sampling.records_allowed else []

    rows_can_join = packing_enabled(policy.model)
    capacity = T
    if rows_can_join and num_admissible(prompts, [], 0, sampling, T) < R:
        capacity += T // MARGIN_SHARE + 1

    batch = _Batch(None, None, [], [])
    away = _RowsAway(prefill, prompts, decoded, capacity, rows_can_join)
    num_started = 0
    while True:
        # Rows come back with their answers, and waiting rows start.
        if away.rows and len(away.rows) >= batch.num_live and (rows_can_join or not batch.num_live):
            batch = batch.joined(away.come_back())
        if num_started < R and (rows_can_join or not batch.num_live):
            in_flight = [row for _, row, _ in batch.live()] + away.rows
            count = num_admissible(prompts, in_flight, num_started, sampling, capacity)
            if count:
                new_rows = range(num_started, num_started + count)
                num_started += count
                new = prefill([prompts[row] for row in new_rows], capacity)
                batch = batch.joined(_Batch(*new, new_rows, [0] * count))
                del new  # whose keys and values have been copied
        live = batch.live()
        if not live:
            break

        u_B = None if uniforms_RT is None else uniforms_RT[batch.rows_B, batch.t_B]
        token_B, logprob_B, allowed_BV = draw_and_record(batch.logits_BV, u_B, sampling)
        drawn_B = token_B.cpu()
        decoded.tokens_RT[batch.rows_B, batch.t_B] = drawn_B
        decoded.logprobs_RT[batch.rows_B, batch.t_B] = logprob_B.cpu()
        if allowed_BV is not None:
            counts = allowed_BV.sum(dim=1).tolist()
            ids_of_row = allowed_BV.nonzero()[:, 1].int().cpu().split(counts)
            for b, row, t in live:
                allowed_ids[row][t] = ids_of_row[b]

        drawn = drawn_B.tolist()
        ended = []
        for b, row, t in live:
            is_end = drawn[b] in end_ids
            if stops.strings and not is_end:
                first = max(t + 1 - stops.span, away.turn_starts[row])
                is_end = stops.has_stop(decoded.tokens_RT[row, first : t + 1].tolist())
            if is_end:
                ended.append(b)
                decoded.lengths[row] = t + 1
                decoded.finished[row] = True
            batch.is_live_B[b] = not is_end and t < T - 1
        if replies is not None and ended:
            away.leave(batch, ended, replies)
        if on_tokens is not None:
            on_tokens(len(live))
        if not batch.num_live:
            continue

        # Taking rows out copies the cache. A row that has drawn its last token of T must go: it has no further random
        # number, and its next position may exceed the context.
        num_ended = len(drawn) - batch.num_live
        some_are_at_the_end = int(batch.t_B.max()) == T - 1
        if num_ended >= max(len(drawn) // 8, 1) or batch.decoder.is_full or some_are_at_the_end:
            token_B = token_B[batch.keep_live()]
        batch.logits_BV = batch.decoder.step(token_B)
        batch.t_B += 1

    if sampling.records_allowed:
        allowed = []
        for ids_T, length in zip(allowed_ids, decoded.lengths, strict=True):
            counts = [len(ids_k) for ids_k in ids_T[:length]]
            allowed.append(AllowedTokens(torch.cat(ids_T), torch.tensor(counts, dtype=torch.int32)))
        decoded = decoded._replace(allowed=allowed)
    return decoded


class _Batch:
    """The rows that are decoded together. An ended row is not live, and remains until it is taken out."""

    def __init__(self, decoder: Decoder | None, logits_BV: Tensor | None, rows: Sequence[int], t: Sequence[int]):
        self.decoder = decoder
        self.logits_BV = logits_BV
        self.rows_B = torch.tensor(rows, dtype=torch.long)
        self.t_B = torch.tensor(t, dtype=torch.long)
        """Index of each row's next token."""
        self.is_live_B = torch.ones(len(rows), dtype=torch.bool)

    @property
    def num_live(self) -> int:
        return int(self.is_live_B.sum())

    def live(self) -> list[tuple[int, int, int]]:
        """Of each live row: its place in the batch, its number, and the index of its next token."""
        places = self.is_live_B.nonzero().flatten()
        return list(zip(places.tolist(), self.rows_B[places].tolist(), self.t_B[places].tolist(), strict=True))

    def keep_live(self) -> Tensor:
        """Take ended rows out. Returns the places, on the device, that the others had."""
        places = self.is_live_B.nonzero().flatten()
        self.rows_B = self.rows_B[places]
        self.t_B = self.t_B[places]
        self.is_live_B = self.is_live_B[places]
        places = places.to(self.logits_BV.device)
        self.decoder.keep_rows(places)
        return places

    def joined(self, new: _Batch) -> _Batch:
        """The live rows of both."""
        if not self.num_live or not new.num_live:
            return self if self.num_live else new
        kept = self.keep_live()
        self.decoder.add_rows(new.decoder)
        return _Batch(
            self.decoder,
            torch.cat([self.logits_BV[kept], new.logits_BV]),
            self.rows_B.tolist() + new.rows_B.tolist(),
            self.t_B.tolist() + new.t_B.tolist(),
        )


class _RowsAway:
    """The rows that have ended a turn and wait for an answer, with their keys and values.

    In the cache of models that cannot be packed rows cannot join, so theirs are computed again with the answer.
    """

    def __init__(self, prefill: Prefill, prompts: Prompts, decoded: Decoded, capacity: int, rows_can_join: bool):
        self.prefill = prefill
        self.prompts = prompts
        self.decoded = decoded
        self.capacity = capacity
        self.rows_can_join = rows_can_join
        self.turn_starts = [0] * len(prompts)
        """Index of the first token of each row's turn."""
        self.rows: list[int] = []
        self._answers: list[Future[Sequence[int] | None]] = []
        self._decoder: ForkedCacheDecoder | None = None

    def leave(self, batch: _Batch, ended: list[int], replies: Replies) -> None:
        """Take over the rows at these places in the batch, and ask for their answers."""
        if self.rows_can_join:
            part = batch.decoder.split(torch.tensor(ended, device=batch.logits_BV.device))
            if self._decoder is None:
                self._decoder = part
            else:
                self._decoder.add_rows(part)
        for row in batch.rows_B[ended].tolist():
            turn = self.decoded.tokens_RT[row, self.turn_starts[row] : self.decoded.lengths[row]]
            self.rows.append(row)
            self._answers.append(replies(row, turn.tolist()))

    def come_back(self) -> _Batch:
        """Wait for all answers, and append them. Returns the rows that go on."""
        decoded = self.decoded
        going_on = []
        rows = []
        new_tokens = []
        for i, (row, future) in enumerate(zip(self.rows, self._answers, strict=True)):
            answer = future.result()
            if answer is None:
                continue
            start = decoded.lengths[row]
            end = start + len(answer)
            assert end < decoded.tokens_RT.shape[1], "an answer leaves no room for another turn"
            decoded.tokens_RT[row, start:end] = torch.tensor(answer)
            decoded.logprobs_RT[row, start:end] = 0.0
            decoded.is_answer_RT[row, start:end] = True
            # Until another turn ends:
            decoded.lengths[row] = decoded.tokens_RT.shape[1]
            decoded.finished[row] = False
            self.turn_starts[row] = end
            going_on.append(i)
            rows.append(row)
            # The last token of the turn has been drawn, and not been computed.
            new_tokens.append(decoded.tokens_RT[row, start - 1 : end].tolist())

        decoder = self._decoder
        self.rows = []
        self._answers = []
        self._decoder = None
        starts = [self.turn_starts[row] for row in rows]
        if not rows:
            return _Batch(None, None, [], [])
        if self.rows_can_join:
            decoder.keep_rows(torch.tensor(going_on, device=decoder.positions_R.device))
            return _Batch(decoder, decoder.extend(new_tokens), rows, starts)
        prefixes = []
        for row, start in zip(rows, starts, strict=True):
            prefixes.append((*self.prompts[row], *decoded.tokens_RT[row, :start].tolist()))
        return _Batch(*self.prefill(prefixes, self.capacity), rows, starts)


def num_admissible(
    prompts: Prompts,
    in_flight: Sequence[int],
    num_started: int,
    sampling: SamplingParams,
    capacity: int,
) -> int:
    """The number of waiting rows that may start beside those in flight, under ``tokens_in_flight`` tokens of KV cache.

    Each row counts as many tokens as the longest prompt of all these rows plus ``capacity``. Only whole groups start.
    If nothing is in flight and not even one group fits, a part of the group starts, and at least one row.
    """
    if sampling.tokens_in_flight is None:
        return len(prompts) - num_started
    longest = max((len(prompts[row]) for row in in_flight), default=0)
    count = 0
    for prompt, group in groupby(prompts[num_started:]):
        longest = max(longest, len(prompt))
        room = sampling.tokens_in_flight // (longest + capacity) - len(in_flight) - count
        size = len(list(group))
        if size > room:
            if in_flight or count:
                return count
            return max(room, 1)
        count += size
    return count

"""The decode loop with continuous batching: rows leave the batch when they end, and waiting rows take their places.

With tools a row also leaves at the end of a turn, and comes back with the answer, which enters its KV cache by one
forward pass. Answers are waited for when half of the rows in flight have left: which rows share a batch, and with it
every bit, then depends on the tokens alone, not on how long a tool takes.

Shapes: ``R`` rows (completions), ``B`` rows in the batch, ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
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
    T = sampling.max_completion_length
    stops = Stops(policy, sampling.stop)
    end_ids = set(stops.ids)
    rows = [_Row(number, prompt) for number, prompt in enumerate(prompts)]

    rows_can_join = packing_enabled(policy.model)
    capacity = T
    if rows_can_join and num_admissible(prompts, [], sampling, T) < len(prompts):
        capacity += T // MARGIN_SHARE + 1

    batch = _Batch()
    away = _RowsAway()
    num_started = 0
    while True:
        # Rows come back with their answers, and waiting rows start.
        if len(away.rows) >= max(len(batch.live), 1) and (rows_can_join or not batch.live):
            batch.join(away.come_back(prefill, capacity))
        if num_started < len(rows) and (rows_can_join or not batch.live):
            waiting = prompts[num_started:]
            in_flight = [row.prompt for row in batch.live_rows() + away.rows]
            count = num_admissible(waiting, in_flight, sampling, capacity)
            if count:
                new_rows = rows[num_started : num_started + count]
                batch.join(_Batch(*prefill(waiting[:count], capacity), new_rows))
                num_started += count
        if not batch.live:
            break

        # Every row draws a token, also one that has ended.
        u_B = None
        if uniforms_RT is not None:
            u_B = uniforms_RT[[row.number for row in batch.rows], batch.t]
        token_B, logprob_B, allowed_BV = draw_and_record(batch.logits_BV, u_B, sampling)
        drawn = token_B.tolist()
        logprobs = logprob_B.tolist()
        if allowed_BV is not None:
            counts = allowed_BV.sum(dim=1).tolist()
            allowed = allowed_BV.nonzero()[:, 1].int().cpu().split(counts)

        live = []
        ended = []
        for b in batch.live:
            row = batch.rows[b]
            row.tokens.append(drawn[b])
            row.logprobs.append(logprobs[b])
            row.is_answer.append(False)
            if allowed_BV is not None:
                row.allowed.append(allowed[b])
            row.finished = drawn[b] in end_ids
            if stops.strings and not row.finished:
                first = max(len(row.tokens) - stops.span, row.turn_start)
                row.finished = stops.has_stop(row.tokens[first:])
            if row.finished:
                ended.append(b)
            elif len(row.tokens) < T:
                live.append(b)
        if on_tokens is not None:
            on_tokens(len(batch.live))
        batch.live = live
        if replies is not None and ended:
            away.leave(batch, ended, replies, rows_can_join)
        if not live:
            continue

        # Taking rows out copies the cache. A row that has drawn its last token of T must go: it has no further random
        # number, and its next position may exceed the context.
        num_ended = len(drawn) - len(live)
        is_last = max(batch.t) == T - 1
        if num_ended >= max(len(drawn) // 8, 1) or batch.decoder.is_full or is_last:
            token_B = token_B[batch.keep_live()]
        batch.logits_BV = batch.decoder.step(token_B)
        batch.t = [t + 1 for t in batch.t]

    decoded = Decoded.empty(len(rows), T)
    for r, row in enumerate(rows):
        length = len(row.tokens)
        decoded.tokens_RT[r, :length] = torch.tensor(row.tokens)
        decoded.logprobs_RT[r, :length] = torch.tensor(row.logprobs)
        decoded.is_answer_RT[r, :length] = torch.tensor(row.is_answer)
        decoded.lengths[r] = length
        decoded.finished[r] = row.finished
    if sampling.records_allowed:
        decoded = decoded._replace(allowed=[row.allowed_tokens() for row in rows])
    return decoded


@dataclass
class _Row:
    """A completion that is being decoded."""

    number: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    allowed: list[Tensor] = field(default_factory=list)
    """The ids of the tokens that were allowed in place of each token."""
    turn_start: int = 0
    """Index of the first token of the turn."""
    finished: bool = False
    answer: Future[Sequence[int] | None] | None = None
    """To the last turn."""

    def append_answer(self, answer: Sequence[int]) -> None:
        self.tokens += answer
        self.logprobs += [0.0] * len(answer)
        self.is_answer += [True] * len(answer)
        self.allowed += [torch.empty(0, dtype=torch.int32)] * len(answer)
        self.turn_start = len(self.tokens)
        self.finished = False

    def allowed_tokens(self) -> AllowedTokens:
        counts = [len(ids_k) for ids_k in self.allowed]
        return AllowedTokens(torch.cat(self.allowed), torch.tensor(counts, dtype=torch.int32))


class _Batch:
    """The rows that are decoded together."""

    def __init__(
        self,
        decoder: Decoder | None = None,
        logits_BV: Tensor | None = None,
        rows: Sequence[_Row] = (),
    ):
        self.decoder = decoder
        self.logits_BV = logits_BV
        self.rows = list(rows)
        self.t = [len(row.tokens) for row in rows]
        """Index of the next token in each place; an ended row draws tokens, too, until it is taken out."""
        self.live = list(range(len(rows)))
        """Places of the rows that go on."""

    def live_rows(self) -> list[_Row]:
        return [self.rows[b] for b in self.live]

    def keep_live(self) -> Tensor:
        """Take ended rows out. Returns the places, on the device, that the others had."""
        places = torch.tensor(self.live, device=self.logits_BV.device)
        self.decoder.keep_rows(places)
        self.rows = self.live_rows()
        self.t = [self.t[b] for b in self.live]
        self.live = list(range(len(places)))
        return places

    def join(self, new: _Batch) -> None:
        """Take ended rows out, and append those of another batch."""
        if not new.rows:
            return
        if not self.live:
            vars(self).update(vars(new))
            return
        places = self.keep_live()
        self.decoder.add_rows(new.decoder)
        self.logits_BV = torch.cat([self.logits_BV[places], new.logits_BV])
        self.rows += new.rows
        self.t += new.t
        self.live = list(range(len(self.rows)))


class _RowsAway:
    """The rows that have ended a turn and wait for an answer, with their keys and values.

    In the cache of models that cannot be packed rows cannot join, so theirs are computed again with the answer.
    """

    def __init__(self):
        self.rows: list[_Row] = []
        self.decoder: ForkedCacheDecoder | None = None

    def leave(self, batch: _Batch, ended: list[int], replies: Replies, rows_can_join: bool) -> None:
        """Take over the rows at these places in the batch, and ask for their answers."""
        if rows_can_join:
            part = batch.decoder.split(torch.tensor(ended, device=batch.logits_BV.device))
            if self.decoder is None:
                self.decoder = part
            else:
                self.decoder.add_rows(part)
        for b in ended:
            row = batch.rows[b]
            row.answer = replies(row.number, row.tokens[row.turn_start :])
            self.rows.append(row)

    def come_back(self, prefill: Prefill, capacity: int) -> _Batch:
        """Wait for all answers, and append them. Returns the rows that go on."""
        rows = []
        places = []
        new_tokens = []
        for place, row in enumerate(self.rows):
            answer = row.answer.result()
            if answer is not None:
                places.append(place)
                rows.append(row)
                # The last token of the turn has been drawn, and not been computed.
                new_tokens.append([row.tokens[-1], *answer])
                row.append_answer(answer)

        decoder = self.decoder
        self.rows = []
        self.decoder = None
        if not rows:
            return _Batch()
        if decoder is None:
            prefixes = [(*row.prompt, *row.tokens) for row in rows]
            return _Batch(*prefill(prefixes, capacity), rows)
        decoder.keep_rows(torch.tensor(places, device=decoder.positions_R.device))
        return _Batch(decoder, decoder.extend(new_tokens), rows)


def num_admissible(waiting: Prompts, in_flight: Prompts, sampling: SamplingParams, capacity: int) -> int:
    """The number of waiting rows that may start beside those in flight, under ``tokens_in_flight`` tokens of KV cache.

    Each row counts as many tokens as the longest prompt of all these rows plus ``capacity``. Only whole groups start.
    If nothing is in flight and not even one group fits, a part of the group starts, and at least one row.
    """
    if sampling.tokens_in_flight is None:
        return len(waiting)
    longest = max(map(len, in_flight), default=0)
    count = 0
    for prompt, group in groupby(waiting):
        longest = max(longest, len(prompt))
        most_rows = sampling.tokens_in_flight // (longest + capacity)
        room = most_rows - len(in_flight) - count
        size = len(list(group))
        if size > room:
            is_first = not in_flight and not count
            return max(room, 1) if is_first else count
        count += size
    return count

"""The decode loop with continuous batching: waiting rows take the places of rows that have ended.

With tools a row also leaves at the end of a turn, and comes back with the answer, which enters its
KV cache by one forward pass. The loop waits for all answers when half of the rows in flight have
left. Which rows share a batch, and with it every bit, then depends on the tokens alone, not on how
long a tool takes.

Shapes: ``R`` rows (completions), ``B`` rows in the batch, ``T`` most tokens of a completion, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from grpo.algorithm.batch import Completion
from grpo.attention import packing_enabled
from grpo.model import Policy
from grpo.rollout.draw import SamplingParams, draw_tokens
from grpo.rollout.interface import Replies
from grpo.rollout.prefill import Decoder, ForkedCacheDecoder, Prompts
from grpo.rollout.stops import Stops

MARGIN_SHARE = 8
"""T is divided by this for the margin of the KV cache if rows join later: with it, the cache is
compacted less often."""

Prefill = Callable[[Prompts, int], tuple[Decoder, Tensor]]
"""A function of prompts and capacity: :func:`grpo.rollout.prefill.prefill` of a policy."""


@dataclass(eq=False)
class Row:
    """A completion that is being decoded, in as many turns as there are answers."""

    number: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_drawn: list[bool] = field(default_factory=list)
    """False at the tokens of an answer, whose log-prob is 0."""
    turn_start: int = 0
    """Index of the first token of the turn."""
    finished: bool = False
    answer: Future[Sequence[int] | None] | None = None
    """The answer to the last turn."""

    def append_answer(self, answer: Sequence[int]) -> None:
        """Append the tokens of an answer, after which the next turn starts."""
        self.tokens += answer
        self.logprobs += [0.0] * len(answer)
        self.is_drawn += [False] * len(answer)
        self.turn_start = len(self.tokens)

    def completion(self, sampling: SamplingParams) -> Completion:
        """The completion, without its text."""
        return Completion(
            tuple(self.tokens),
            text="",
            finished=self.finished,
            sampling_logprobs=() if sampling.is_greedy else tuple(self.logprobs),
            loss_mask=() if all(self.is_drawn) else tuple(self.is_drawn),
        )


def decode(
    policy: Policy,
    prefill: Prefill,
    prompts: Prompts,
    uniforms_RT: Tensor | None,
    sampling: SamplingParams,
    on_tokens: Callable[[int], None] | None = None,
    replies: Replies | None = None,
) -> list[Row]:
    """Decode every row to its end, as many at once as ``tokens_in_flight`` allows.

    Waiting rows start as soon as ended rows have freed memory for a whole group. Models that cannot
    be packed have a cache that rows cannot join: there they start when all others have ended.

    ``uniforms_RT`` draw the tokens, on the policy's device; None: greedy. ``on_tokens`` is called
    with the number of tokens drawn since its last call.
    """
    T = sampling.max_completion_length
    stops = Stops(policy, sampling.stop)
    rows_can_join = packing_enabled(policy.model)
    capacity = T
    if rows_can_join and num_admissible(prompts, [], sampling, T) < len(prompts):
        capacity += T // MARGIN_SHARE + 1

    rows = [Row(number, prompt) for number, prompt in enumerate(prompts)]
    num_started = 0
    batch = _Batch([])
    away = _PausedRows()
    while True:
        # Rows come back with their answers, and waiting rows start.
        half_are_away = len(away.rows) >= max(len(batch.live), 1)
        if half_are_away and (rows_can_join or not batch.live):
            batch.join(away.come_back(prefill, capacity))
        waiting = prompts[num_started:]
        if waiting and (rows_can_join or not batch.live):
            in_flight = [batch.rows[b].prompt for b in batch.live]
            in_flight += [row.prompt for row in away.rows]
            count = num_admissible(waiting, in_flight, sampling, capacity)
            if count:
                new_rows = rows[num_started : num_started + count]
                num_started += count
                batch.join(_Batch(new_rows, *prefill(waiting[:count], capacity)))
        if not batch.live:
            break

        token_B = batch.draw(uniforms_RT, sampling)
        if on_tokens:
            on_tokens(len(batch.live))
        ended = batch.end_rows(stops, T)
        if replies and ended:
            away.leave(batch, ended, replies, rows_can_join)
        if not batch.live:
            continue

        # A row that has drawn token T must go: it has no further random number, and its next
        # position may exceed the context.
        num_ended = len(batch.rows) - len(batch.live)
        many = max(int(len(batch.rows) * batch.decoder.least_ended), 1)
        if num_ended >= many or batch.decoder.is_full or max(batch.t) == T:
            places = batch.keep_live()
            token_B = token_B[places]
        batch.logits_BV = batch.decoder.step(token_B)

    return rows


class _Batch:
    """The rows that are decoded together."""

    def __init__(
        self,
        rows: list[Row],
        decoder: Decoder | None = None,
        logits_BV: Tensor | None = None,
    ):
        self.rows = rows
        self.decoder = decoder
        self.logits_BV = logits_BV
        self.t = [len(row.tokens) for row in rows]
        """Index of the next token in each place of the batch."""
        self.live = list(range(len(rows)))
        """Places of the rows that go on. An ended row is computed, too, until it is taken out."""

    def draw(
        self,
        uniforms_RT: Tensor | None,
        sampling: SamplingParams,
    ) -> Tensor:
        """Draw a token for every row, and append it to those that go on."""
        u_B = None
        if uniforms_RT is not None:
            u_B = uniforms_RT[[row.number for row in self.rows], self.t]
        token_B, logprob_B = draw_tokens(self.logits_BV, u_B, sampling)
        self.t = [t + 1 for t in self.t]

        drawn = token_B.tolist()
        logprobs = logprob_B.tolist()
        for b in self.live:
            row = self.rows[b]
            row.tokens.append(drawn[b])
            row.logprobs.append(logprobs[b])
            row.is_drawn.append(True)
        return token_B

    def end_rows(self, stops: Stops, T: int) -> list[int]:
        """Take rows from the live ones if they end or have T tokens. Returns the places of ends."""
        live = []
        ended = []
        for b in self.live:
            row = self.rows[b]
            first = max(row.turn_start, len(row.tokens) - stops.span)
            row.finished = stops.end(row.tokens[first:])
            if row.finished:
                ended.append(b)
            elif len(row.tokens) < T:
                live.append(b)
        self.live = live
        return ended

    def keep_live(self) -> Tensor:
        """Take ended rows out. Returns the places, on the device, that the others had."""
        places = torch.tensor(self.live, device=self.logits_BV.device)
        self.decoder.keep_rows(places)
        self.rows = [self.rows[b] for b in self.live]
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


class _PausedRows:
    """The rows that have ended a turn and wait for an answer, with their keys and values.

    Models that cannot be packed have a cache that rows cannot join. Their keys and values are
    computed again, with the answer.
    """

    def __init__(self):
        self.rows: list[Row] = []
        self.decoder: ForkedCacheDecoder | None = None

    def leave(
        self,
        batch: _Batch,
        ended: list[int],
        replies: Replies,
        rows_can_join: bool,
    ) -> None:
        """Take over the rows at these places in the batch, and ask for their answers."""
        if rows_can_join:
            part = batch.decoder.split(batch.decoder.start_R.new_tensor(ended))
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
        places = []
        new_tokens = []
        for place, row in enumerate(self.rows):
            answer = row.answer.result()
            if answer is not None:
                places.append(place)
                # The last token of the turn has been drawn, and not been computed.
                new_tokens.append([row.tokens[-1], *answer])
                row.append_answer(answer)

        rows = [self.rows[place] for place in places]
        decoder = self.decoder
        self.rows = []
        self.decoder = None
        if not rows:
            return _Batch([])
        if decoder is None:
            prefixes = [(*row.prompt, *row.tokens) for row in rows]
            return _Batch(rows, *prefill(prefixes, capacity))
        decoder.keep_rows(decoder.start_R.new_tensor(places))
        return _Batch(rows, decoder, decoder.extend(new_tokens))


def num_admissible(
    waiting: Prompts,
    in_flight: Prompts,
    sampling: SamplingParams,
    capacity: int,
) -> int:
    """The number of waiting rows that may start beside those in flight.

    All together they have at most ``tokens_in_flight`` tokens of KV cache. Each row counts as many
    as the longest prompt of all these rows plus ``capacity``. Only whole groups start. If nothing
    is in flight and not even one group fits, a part of the group starts, and at least one row.
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
            return count if in_flight or count else max(room, 1)
        count += size
    return count

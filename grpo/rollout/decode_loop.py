"""The decode loop with continuous batching: waiting rows take the places of rows that have ended.

A row is one completion. It waits until it may start. It is then active: decoded in one batch with
other rows, one token at a time. A turn of the model ends at an EOS token or a stop string. Without
tools the row ends with its first turn. With tools the row is paused while the tool works. It
becomes active again together with the other paused rows, or ends if there is no answer. In any case
a row ends when it has T tokens, the limit. Active and paused rows are in flight. One pass of the
loop (:func:`decode`) has these phases::

    come back    once at least half of the rows in flight are paused, the loop waits for all their
                 answers, and the paused rows join the batch with the tokens of the answers
    start        as many waiting rows join the batch as fit into memory beside the rows in flight
    draw         one token for each row of the batch, from the row's logits and a random number
    end          active rows end or pause, and so become inactive
    take out     the batch drops its inactive rows, not in each pass but many rows at once
    step         the model runs on the drawn tokens, which gives the logits of the next tokens

Some models have a KV cache to which no rows can be added. Their paused and waiting rows join only
once no row is active.

How long a tool takes has no influence on the batches: the loop waits for all answers before any row
comes back. Rounding depends on the batch, so two runs with the same answers give the same tokens.

R   all rows of the rollout               T   token limit of a completion, answers included
B   rows of the batch                     V   vocabulary
b   place of a row in the batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.attention import packing_enabled
from grpo.model import Policy
from grpo.rollout.draw import SamplingParams, draw_tokens
from grpo.rollout.interface import Replies
from grpo.rollout.prefill import Decoder, Prompts
from grpo.rollout.stops import Stops

Prefill = Callable[[Prompts, int], tuple[Decoder, Tensor]]
"""A function that runs the model on the prompts of rows, :func:`grpo.rollout.prefill.prefill` with
its other arguments bound.

Its arguments are the prompts, or prompts with the tokens so far, and the capacity: the number of
token slots in the KV cache after the longest prompt. A cache that rows cannot join grows by itself,
and ignores the capacity. The function returns a decoder, which holds the KV cache and runs the
model on further tokens, and the logits ``[B, V]`` of each row's next token."""


@dataclass
class Row:
    """A completion that is being decoded: one turn, or several with an answer after each but the
    last."""

    number: int
    """Index among all rows of the rollout."""
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_drawn: list[bool] = field(default_factory=list)
    """True at drawn tokens, False at tokens of an answer, for which ``logprobs`` has 0."""
    turn_start: int = 0
    """Index in ``tokens`` of the first token of the current turn."""
    finished: bool = False
    """True if the last turn ended at an EOS token or stop string, False if it reached T tokens.
    Valid once the row has ended."""
    answer: Future[Sequence[int] | None] | None = None
    """The answer to the latest turn, set when the row pauses. None before the first pause. The
    future gives None if the completion ends with that turn."""

    def append_answer(self, answer: Sequence[int]) -> None:
        """Append the tokens of an answer, after which the next turn starts."""
        self.tokens += answer
        self.logprobs += [0.0] * len(answer)
        self.is_drawn += [False] * len(answer)
        self.turn_start = len(self.tokens)

    def completion(self, sampling: SamplingParams, stops: Stops) -> Completion:
        """Return the completion, with its text."""
        # Empty log-probs stand for greedy decoding, which has probability 1 for each token. An
        # empty mask says that all tokens were drawn.
        logprobs = () if sampling.is_greedy else tuple(self.logprobs)
        loss_mask = () if all(self.is_drawn) else tuple(self.is_drawn)
        return Completion(
            tuple(self.tokens),
            text=stops.text(self.tokens),
            finished=self.finished,
            sampling_logprobs=logprobs,
            loss_mask=loss_mask,
        )


def grouped(
    problems: Sequence[Problem],
    rows: Sequence[Row],
    sampling: SamplingParams,
    stops: Stops,
) -> list[Group]:
    """Return one group of completions per problem.

    ``rows`` has the rows of the first problem, then as many of the next, and so on.
    """
    G = sampling.num_generations
    completions = [row.completion(sampling, stops) for row in rows]
    groups = []
    for p, problem in enumerate(problems):
        first = p * G
        group = completions[first : first + G]
        groups.append(Group(problem, tuple(group)))
    return groups


class _Batch:
    """The rows that are decoded together.

    A row that ends or pauses becomes inactive. An inactive row keeps its place, and the model runs
    on it, until :meth:`keep_active` drops the row.
    """

    def __init__(
        self,
        rows: list[Row],
        decoder: Decoder | None = None,
        logits_BV: Tensor | None = None,
    ):
        self.rows = rows
        self.decoder = decoder
        """Decoder with the KV cache of the rows. None only in a batch without rows."""
        self.logits_BV = logits_BV
        """Logits of the next token of each row. None only in a batch without rows."""
        self.next_index = [len(row.tokens) for row in rows]
        """Index of each row's next token in its completion. It also advances in inactive rows, on
        which the model runs as well: they need a random number, too."""
        self.active = list(range(len(rows)))
        """Places of the rows that have neither ended nor paused."""

    def joined(self, new: _Batch) -> _Batch:
        """Return a batch with the active rows of this batch and the rows of a new batch.

        Afterwards only the returned batch may be used.
        """
        if not new.rows:
            return self
        if not self.active:
            return new
        # The logits still have the rows' old places.
        places = self.keep_active()
        self.decoder.add_rows(new.decoder)
        logits = [self.logits_BV[places], new.logits_BV]
        return _Batch(self.rows + new.rows, self.decoder, torch.cat(logits))

    def draw(
        self,
        uniforms_RT: Tensor | None,
        sampling: SamplingParams,
    ) -> Tensor:
        """Draw tokens ``[B]``, one per row, and append each to its row if the row is active."""
        u_B = None
        if uniforms_RT is not None:
            # The random number of a token is fixed by its row and its index. So it depends neither
            # on the other rows of the batch nor on when its row started.
            numbers = [row.number for row in self.rows]
            u_B = uniforms_RT[numbers, self.next_index]
        token_B, logprob_B = draw_tokens(self.logits_BV, u_B, sampling)
        self.next_index = [index + 1 for index in self.next_index]

        # One transfer from the device for all rows, and not one for each row.
        tokens = token_B.tolist()
        logprobs = logprob_B.tolist()
        for b in self.active:
            row = self.rows[b]
            row.tokens.append(tokens[b])
            row.logprobs.append(logprobs[b])
            row.is_drawn.append(True)
        return token_B

    def end_rows(self, stops: Stops, T: int) -> list[int]:
        """Make rows inactive if their turn has ended, or if they have T tokens.

        Returns the places of the rows whose turn has ended, at an EOS token or a stop string. A row
        whose turn ends with its T-th token is among them, and gets None for an answer. A row that
        is cut at T tokens is not.
        """
        active = []
        ended_turn = []
        for b in self.active:
            row = self.rows[b]
            # A stop string that ends with the new token lies within the last search_length tokens.
            # The search does not go back before the turn: a stop string in an answer ends nothing.
            first = max(row.turn_start, len(row.tokens) - stops.search_length)
            last_tokens = row.tokens[first:]
            # It stands if this is the row's last turn.
            row.finished = stops.has_ended(last_tokens)
            if row.finished:
                ended_turn.append(b)
            elif len(row.tokens) < T:
                active.append(b)
        self.active = active
        return ended_turn

    def keep_active(self) -> list[int]:
        """Drop the inactive rows. Returns the former places of the active rows.

        ``logits_BV`` stays as it is, with a row for each of the old places: the caller indexes it
        with the places, or replaces it.
        """
        places = self.active
        self.decoder.keep_rows(places)
        self.rows = [self.rows[b] for b in places]
        self.next_index = [self.next_index[b] for b in places]
        self.active = list(range(len(places)))
        return places


def _prefilled(rows: list[Row], prefill: Prefill, capacity: int) -> _Batch:
    """Run the model on all tokens of the rows, prompts included, and return a batch of the rows."""
    prefixes = [(*row.prompt, *row.tokens) for row in rows]
    decoder, logits_BV = prefill(prefixes, capacity)
    return _Batch(rows, decoder, logits_BV)


class _PausedRows:
    """The rows that have ended a turn and wait for an answer."""

    def __init__(self):
        self.rows = []
        self.decoder = None
        """The decoder with their KV cache. None while no row has paused. Always None if rows cannot
        join, since the caches of rows that pause at different times could not become one. Their
        cache is then computed again, from all their tokens, when they come back."""

    def pause(
        self,
        batch: _Batch,
        places: list[int],
        replies: Replies,
        rows_can_join: bool,
    ) -> None:
        """Take over the rows at these places in the batch, and request answers to their turns."""
        if rows_can_join:
            # Keys and values are copied, since the batch is going to drop these rows.
            part = batch.decoder.copy_rows(places)
            if self.decoder is None:
                self.decoder = part
            else:
                self.decoder.add_rows(part)
        for b in places:
            row = batch.rows[b]
            turn = row.tokens[row.turn_start :]
            row.answer = replies(row.number, turn)
            self.rows.append(row)

    def come_back(self, prefill: Prefill, capacity: int) -> _Batch:
        """Wait for all answers, and append each to its row. Return a batch of the rows that go on.

        The other rows end with the turn that got no answer.
        """
        places = []
        rows = []
        new_tokens = []
        for place, row in enumerate(self.rows):
            answer = row.answer.result()
            if answer is not None:  # else the completion ends with this turn
                places.append(place)
                rows.append(row)
                # The row paused before the step on the turn's last token. So the model runs on this
                # token first, then on the answer. Appending the answer changes tokens[-1].
                new_tokens.append([row.tokens[-1], *answer])
                row.append_answer(answer)

        if not rows:
            return _Batch([])
        if self.decoder is None:
            return _prefilled(rows, prefill, capacity)
        self.decoder.keep_rows(places)
        logits_BV = self.decoder.extend(new_tokens)
        return _Batch(rows, self.decoder, logits_BV)


def num_admissible(
    waiting: Prompts,
    in_flight: Prompts,
    sampling: SamplingParams,
    capacity: int,
) -> int:
    """Return the number of waiting rows that may start beside the rows in flight.

    A row takes ``longest prompt + capacity`` tokens of KV cache, and all rows together take at most
    ``tokens_in_flight``. Groups are neighbouring rows with equal prompts. Only whole groups start,
    so that each prompt is computed once. With nothing in flight, a group that does not fit starts
    in parts, and one row starts in any case. Inactive rows that the batch has not dropped yet are
    not counted, so a paused row can take its memory twice for a while.
    """
    if sampling.tokens_in_flight is None:
        return len(waiting)
    longest = max(map(len, in_flight), default=0)
    count = 0
    for prompt, group in groupby(waiting):
        # One long prompt makes every row count more: prompts are padded to the longest.
        longest = max(longest, len(prompt))
        max_rows = sampling.tokens_in_flight // (longest + capacity)
        room = max_rows - len(in_flight) - count
        size = len(list(group))
        if size > room:
            if in_flight or count:
                return count
            # Nothing is in flight, so this group will never have more room. As many of its rows
            # start as fit, and one in any case: otherwise no row would ever start.
            return max(room, 1)
        count += size
    return count


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

    Args:
        policy: determines which tokens end a turn, and whether rows can join a batch.
        prefill: runs the model on prompts, and returns the decoder that continues the prompts.
        prompts: the prompt of each row. Rows of one group are neighbours.
        uniforms_RT: ``[R, T]`` random numbers in [0, 1), one per token, on the policy's device.
            None if ``sampling`` is greedy, or if there are no prompts.
        sampling: ``max_completion_length`` is T.
        on_tokens: called with the number of tokens drawn for active rows since its last call.
        replies: called with a row's number and the tokens of its turn. Returns a future of the
            answer's tokens, or of None if the completion ends with this turn. With the answer the
            row has fewer than T tokens. Without ``replies`` each completion is one turn.

    Returns:
        The rows in the order of the prompts, all ended.
    """
    T = sampling.max_completion_length
    stops = Stops(policy, sampling.stop)
    # Rows can join a ForkedCacheDecoder alone. It replaces the model's attention, which is right
    # for models that can be packed. All others are decoded by DynamicCacheDecoder.
    rows_can_join = packing_enabled(policy.model)
    capacity = T
    some_must_wait = num_admissible(prompts, [], sampling, T) < len(prompts)
    if rows_can_join and some_must_wait:
        # All rows write at the same index of the cache, so a row that joins later starts at a later
        # index, and the cache is full before the row has T tokens. It is then copied, which frees
        # the indices of rows that have left. A margin makes these copies rarer. It takes memory, so
        # there is none if all rows start together: then only rows that come back start later.
        capacity += T // 8 + 1

    rows = [Row(number, prompt) for number, prompt in enumerate(prompts)]
    num_started = 0
    batch = _Batch([])
    paused = _PausedRows()
    while True:
        # Come back. With a smaller fraction than half, the loop would wait for tools more often;
        # with a larger one, it would decode smaller batches. Rows in flight are paused or active,
        # so half of them are paused if as many rows are paused as are active.
        num_paused = len(paused.rows)
        half_have_paused = num_paused > 0 and num_paused >= len(batch.active)
        if half_have_paused and (rows_can_join or not batch.active):
            batch = batch.joined(paused.come_back(prefill, capacity))
            paused = _PausedRows()

        # Start. Paused rows keep their memory, so they count as in flight.
        waiting = prompts[num_started:]
        if waiting and (rows_can_join or not batch.active):
            in_flight = [batch.rows[b].prompt for b in batch.active]
            in_flight += [row.prompt for row in paused.rows]
            count = num_admissible(waiting, in_flight, sampling, capacity)
            if count:
                new_rows = rows[num_started : num_started + count]
                num_started += count
                # The new batch gets no name here: a name would keep its KV cache in memory after
                # joined() has copied it.
                batch = batch.joined(_prefilled(new_rows, prefill, capacity))
        # If no row is active here, none is paused: paused rows have come back or ended above. None
        # is waiting either, since at least one would have started. So all have ended.
        if not batch.active:
            return rows

        # Draw, and end. Rows end before the step: the last token of a completion needs none, and
        # that of a turn gets its step when the row comes back.
        token_B = batch.draw(uniforms_RT, sampling)
        if on_tokens:
            on_tokens(len(batch.active))
        ended_turn = batch.end_rows(stops, T)
        if replies and ended_turn:
            paused.pause(batch, ended_turn, replies, rows_can_join)
        if not batch.active:
            # Frees the KV cache of the batch before others are computed.
            batch = _Batch([])
            continue

        # Take out. This copies the KV cache, so the model also runs on inactive rows until there
        # are enough of them. Two cases cannot wait. A full cache must be copied before it takes
        # another token. And an inactive row whose next index is T has no random number left, and
        # its next position may exceed the context. Active rows have fewer than T tokens.
        num_inactive = len(batch.rows) - len(batch.active)
        min_inactive = max(int(len(batch.rows) * batch.decoder.min_ended_fraction), 1)
        must_take_out = batch.decoder.is_full or max(batch.next_index) == T
        if must_take_out or num_inactive >= min_inactive:
            # The logits need no selection: the step replaces them.
            places = batch.keep_active()
            token_B = token_B[places]

        # Step. The keys and values of the drawn tokens go into the KV cache.
        batch.logits_BV = batch.decoder.step(token_B)

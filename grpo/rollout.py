"""Problems to groups of sampled completions.

Each prompt is prefilled once, its cache forked G times; a token is drawn by inverting the CDF at a uniform number that was
fixed ahead by the row's own address; finished rows leave the batch instead of being decoded to the end of the longest, and rows that
had to wait take their places.

Shapes: ``U`` prompts, ``R`` rows in flight, ``L`` padded prompt length, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from grpo.batch import Completion, Group, Problem
from grpo.forking import ForkedCache
from grpo.graphs import LOOK_EVERY
from grpo.packing import ATTENTION, forked_hidden, pack_prompts, packed_hidden
from grpo.sampling import Sampling, draw
from grpo.seeding import generator

SPARE = 8
"""Where rows join others, each has room for one token in so many more than it can have: the cache is copied less often."""


def generate(
    policy,
    problems: Sequence[Problem],
    sampling: Sampling,
    *,
    address: tuple[int, str, int],
    on_tokens: Callable[[int], None] | None = None,
) -> list[Group]:
    """Sample ``num_generations`` completions of each problem.

    Args:
        policy: a ``grpo.model.Policy``; its bare model is used (never a DDP wrapper), in eval mode.
        problems: this rank's problems.
        sampling: how to draw.
        address: ``(seed, purpose, step)``; row g of a problem draws its uniforms from
            ``derive_seed(seed, purpose, step, problem.index, g)``, so that its tokens depend neither on the other rows nor on
            the world size.
        on_tokens: called with the number of tokens drawn since the last call, for progress bars.

    Returns:
        One group per problem, in order.
    """
    seed, purpose, step = address
    G, T = sampling.num_generations, sampling.max_completion_length
    rows = [(p, g) for p in range(len(problems)) for g in range(G)]
    completions: dict[tuple[int, int], Completion] = {}
    with policy.sampling():
        # Captured steps have fixed rows; elsewhere rows that wait take the places of those that end.
        captured = policy.graphs is not None and not sampling.stop
        parts = waves(rows, problems, sampling) if captured else [rows] * bool(rows)
        for part in parts:
            uniforms_RT = None
            if sampling.temperature > 0:
                uniforms_RT = torch.stack(
                    [torch.rand(T, generator=generator(seed, purpose, step, problems[p].index, g)) for p, g in part]
                )
            prompts = [problems[p].prompt_ids for p, _ in part]
            drawn = _decode_rows(policy, prompts, uniforms_RT, sampling, on_tokens)
            completions.update(zip(part, drawn, strict=True))
    return [Group(problem, tuple(completions[p, g] for g in range(G))) for p, problem in enumerate(problems)]


def waves(rows: list[tuple[int, int]], problems: Sequence[Problem], sampling: Sampling) -> list[list[tuple[int, int]]]:
    """Cut the rows so that no wave holds more than ``tokens_in_flight`` tokens of KV cache at its fullest."""
    if sampling.tokens_in_flight is None or not rows:
        return [rows] if rows else []
    waves: list[list[tuple[int, int]]] = [[]]
    longest = 0
    for row in rows:
        longest = max(longest, len(problems[row[0]].prompt_ids))
        if waves[-1] and (len(waves[-1]) + 1) * (longest + sampling.max_completion_length) > sampling.tokens_in_flight:
            waves.append([])
            longest = len(problems[row[0]].prompt_ids)
        waves[-1].append(row)
    return waves


def _decode_rows(policy, prompts, uniforms_RT, sampling: Sampling, on_tokens) -> list[Completion]:
    uniforms_RT = None if uniforms_RT is None else uniforms_RT.to(policy.device)
    drawn = None
    if policy.graphs is not None and not sampling.stop:  # whether a text has come is not for the device to see
        drawn = _decode_captured(policy, prompts, uniforms_RT, sampling, on_tokens)
    tokens_RT, logprobs_RT, lengths, finished = drawn or _decode(policy, prompts, uniforms_RT, sampling, on_tokens)
    texts = policy.tokenizer.batch_decode(
        [tokens_RT[r, :n].tolist() for r, n in enumerate(lengths)], skip_special_tokens=True
    )
    return [
        Completion(
            ids=tuple(tokens_RT[r, : lengths[r]].tolist()),
            text=texts[r],
            finished=finished[r],
            sampling_logprobs=tuple(logprobs_RT[r, : lengths[r]].tolist()) if uniforms_RT is not None else (),
        )
        for r in range(len(prompts))
    ]


Drawn = tuple[torch.Tensor, torch.Tensor, list[int], list[bool]]
"""Tokens and log-probs ``[R, T]`` on the CPU, how many tokens each row has, and whether it ended by itself."""


def _decode(policy, prompts, uniforms_RT, sampling: Sampling, on_tokens) -> Drawn:
    """Prefill the distinct prompts, fork, decode until every row has ended; as many rows at once as the bound allows.

    Rows that wait begin as soon as those that have ended leave room for a whole group (continuous batching), where rows may be
    of different ages (:class:`Forked`), and not when all others have ended, as with other models: a quarter of 128 rows at once, 7% more
    tokens a second (6 to 18; ``benchmarks/rollout.py --waves``).
    """
    device, T, R = policy.device, sampling.max_completion_length, len(prompts)
    tokens_RT = torch.zeros(R, T + 1, dtype=torch.long)  # one place more, for what rows draw after their last token
    logprobs_RT = torch.zeros(R, T + 1)
    lengths, finished = [T] * R, [False] * R
    eos = torch.tensor(policy.eos_ids, device=device)
    joins = policy.model.config._attn_implementation == ATTENTION
    # Where rows join, places of rows that are gone pile up until the next copy of the cache.
    room = T + (T // SPARE + 1) * (joins and _how_many(prompts, [], 0, sampling, T) < R)
    begun, rows_B, num_live = 0, [], 0  # rows that are or were in the batch; the row at each place of it
    t_B = torch.zeros(0, dtype=torch.long)  # the number of its next token
    live_B = torch.ones(0, dtype=torch.bool, device=device)  # whether it has not ended
    look = True  # whether there may be room for rows that wait
    decoder: Forked | Cached | None = None
    logits_BV = torch.zeros(0, 0, device=device)
    while True:
        if look and begun < R and (joins or num_live == 0):
            keep = live_B.nonzero().flatten()
            still = [rows_B[b] for b in keep.tolist()]
            if count := _how_many(prompts, still, begun, sampling, room):
                fresh, logits_of_fresh = prefill(policy, prompts[begun : begun + count], room)
                if still:
                    decoder.keep(keep)
                    decoder.join(fresh)
                    logits_BV = torch.cat([logits_BV[keep], logits_of_fresh])
                else:
                    decoder, logits_BV = fresh, logits_of_fresh
                t_B = torch.cat([t_B[keep.cpu()], torch.zeros(count, dtype=torch.long)])
                rows_B, num_live = [*still, *range(begun, begun + count)], len(still) + count
                live_B = torch.ones(num_live, dtype=torch.bool, device=device)
                begun += count
        u_B = None if uniforms_RT is None else uniforms_RT[rows_B, t_B.clamp(max=T - 1)]
        token_B, logprob_B = draw(logits_BV, u_B, sampling)
        tokens_RT[rows_B, t_B] = token_B.cpu()
        logprobs_RT[rows_B, t_B] = logprob_B.cpu()
        ended_B = torch.isin(token_B, eos) & live_B
        if sampling.stop:
            so_far = zip(rows_B, t_B.tolist(), strict=True)
            hit = [_hits_stop(policy.tokenizer, tokens_RT[row, : t + 1], sampling.stop) for row, t in so_far]
            ended_B |= torch.tensor(hit, device=device) & live_B
        for b in ended_B.nonzero().flatten().tolist():
            lengths[rows_B[b]], finished[rows_B[b]] = int(t_B[b]) + 1, True
        live_B = live_B & ~ended_B
        is_last_B = t_B == T - 1
        if bool(is_last_B.any()):
            live_B = live_B & ~is_last_B.to(device)
        if on_tokens is not None:
            on_tokens(num_live)
        num_live, before = int(live_B.sum()), num_live
        look = num_live < before
        if num_live == 0 and begun == R:
            break
        if num_live == 0:
            continue
        # Leaving costs a copy of the cache, staying a share of every later step; an eighth of the rows is worth it.
        if len(rows_B) - num_live >= max(len(rows_B) // 8, 1) or decoder.is_full:
            keep = live_B.nonzero().flatten()
            rows_B = [rows_B[b] for b in keep.tolist()]
            decoder.keep(keep)
            token_B, live_B, t_B = token_B[keep], live_B[keep], t_B[keep.cpu()]
        logits_BV = decoder.step(token_B)
        t_B = (t_B + 1).clamp(max=T)
    return tokens_RT[:, :T], logprobs_RT[:, :T], lengths, finished


def _how_many(prompts, in_flight: list[int], begun: int, sampling: Sampling, room: int) -> int:
    """Rows that may begin beside those in flight: whole groups, or, where none of a group's rows is and it is too large, as many as fit.

    No more than ``tokens_in_flight`` tokens are held then, each row with its own prompt and ``room`` for its own tokens.
    """
    R, bound = len(prompts), sampling.tokens_in_flight
    if bound is None:
        return R - begun
    longest, end = max((len(prompts[row]) for row in in_flight), default=0), begun
    while end < R and (len(in_flight) + end + 1 - begun) * (max(longest, len(prompts[end])) + room) <= bound:
        longest = max(longest, len(prompts[end]))
        end += 1
    whole = end
    while begun < whole < R and prompts[whole] == prompts[whole - 1]:
        whole -= 1
    if whole > begun or in_flight:
        return whole - begun
    return max(end - begun, 1)


def _decode_captured(policy, prompts, uniforms_RT, sampling: Sampling, on_tokens) -> Drawn | None:
    """The same by :mod:`grpo.graphs`; None where that fails, or, looked at in the first wave, gives something else."""
    try:
        decoder, logits_RV = prefill(policy, prompts, room=sampling.max_completion_length)
        drawn = policy.graphs.decode(decoder.cache, decoder.positions_R, logits_RV, uniforms_RT, sampling, on_tokens)
        if not policy.graphs.checked and len(prompts) >= 4:
            few = replace(sampling, max_completion_length=min(2 * LOOK_EVERY + 1, sampling.max_completion_length))
            expected = _decode(policy, prompts, uniforms_RT, few, None)
            if not _are_alike(drawn, expected, 0.05 if policy.precision == "bf16" else 1e-3):
                policy.without_graphs("they give other tokens than the same steps without")
                return None
            policy.graphs.checked = True
        return drawn
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel that cannot be captured, an operation that looks at a value
        policy.without_graphs((str(error).strip() or type(error).__name__).splitlines()[0])
        return None


def _are_alike(drawn: Drawn, expected: Drawn, tolerance: float) -> bool:
    """Whether half of the rows at least begin with the same tokens, and all of them with log-probs that are off by rounding on average.

    A row parts where its number lies within rounding of a boundary; in bf16 that is no rarity.
    """
    T = expected[0].shape[1]
    same_RT = (drawn[0][:, :T] == expected[0]).cumprod(dim=1).bool()
    written_RT = torch.arange(T) < torch.tensor(expected[2])[:, None]
    parted_R = (~same_RT & written_RT).any(dim=1)
    off = (drawn[1][:, :T] - expected[1]).abs()[same_RT & written_RT]
    return float(parted_R.float().mean()) <= 0.5 and float(off.mean()) < tolerance


def prefill(policy, prompts: Sequence[tuple[int, ...]], room: int) -> tuple[Forked | Cached, torch.Tensor]:
    """A decoder with room for so many tokens of each row, each group's prompt computed once; logits ``[R, V]`` of the first.

    A group are neighbours of the same prompt: two problems that ask the same, with others between them, are two.
    """
    distinct, fork = [], []
    for prompt in prompts:
        if not distinct or prompt != distinct[-1]:
            distinct.append(prompt)
        fork.append(len(distinct) - 1)
    fork_R = torch.tensor(fork, device=policy.device)
    decoder = (Forked if policy.model.config._attn_implementation == ATTENTION else Cached)(policy, distinct, room)
    return decoder, decoder.fork(fork_R)


class Forked:
    """Each prompt in memory once, for all its completions (:mod:`grpo.forking`): for models that can be packed."""

    def __init__(self, policy, prompts: Sequence[tuple[int, ...]], room: int):
        self.policy, self.inner = policy, getattr(policy.model, policy.model.base_model_prefix)
        self.head = policy.model.get_output_embeddings()
        packed = pack_prompts(prompts, policy.device)
        self.cache = ForkedCache([len(prompt) for prompt in prompts], room, policy.device)
        self.hidden_UH = packed_hidden(self.inner, packed, self.cache)[packed.before_M]
        self.positions_R = self.cache.prompt_lengths_U

    def fork(self, fork_R: torch.Tensor) -> torch.Tensor:
        """Row r continues prompt ``fork_R[r]``; logits ``[R, V]`` of each row's first token."""
        self.cache.fork(fork_R)
        self.positions_R = self.positions_R[fork_R]
        return self.head(self.hidden_UH)[fork_R]

    def keep(self, rows: torch.Tensor) -> None:
        self.cache.keep(rows)
        self.positions_R = self.positions_R[rows]

    def join(self, other: Forked) -> None:
        """Go on with another's rows, which have not begun, beside these."""
        self.cache.join(other.cache)
        self.positions_R = torch.cat([self.positions_R, other.positions_R])

    @property
    def is_full(self) -> bool:
        """Whether rows must be let go by :meth:`keep` before the next token."""
        return self.cache.is_full

    def skip(self, tokens: int) -> None:
        """As if so many had been decoded, of which nothing is known: what follows takes memory as late tokens do."""
        self.cache.length += tokens

    def step(self, token_R: torch.Tensor) -> torch.Tensor:
        """One token for every row; logits ``[R, V]`` of the next."""
        decode = self.policy.decoder or partial(forked_hidden, self.inner)
        hidden_RH = decode(token_R, self.positions_R, self.cache)
        self.positions_R = self.positions_R + 1
        return self.head(hidden_RH)


class Cached:
    """A cache of transformers, its rows copied at the fork: for every other model, with whatever attention it has.

    Prompts are padded on the left, so that all rows continue at the same place.
    """

    is_full = False

    def __init__(self, policy, prompts: Sequence[tuple[int, ...]], room: int):
        self.model, self.length = policy.model, max(len(prompt) for prompt in prompts)
        L = self.length
        ids_UL = torch.full((len(prompts), L), policy.pad_id, dtype=torch.long)
        mask_UK = torch.ones(len(prompts), L + room, dtype=torch.bool)  # the places of future tokens are True already
        for u, prompt in enumerate(prompts):
            ids_UL[u, L - len(prompt) :] = torch.tensor(prompt)
            mask_UK[u, : L - len(prompt)] = False
        self.mask_RK = mask_UK.to(policy.device)
        self.cache = rollout_cache(policy.model.config, capacity=L + room)
        positions_UL = (self.mask_RK[:, :L].long().cumsum(dim=1) - 1).clamp(min=0)
        self.logits_UV = self._forward(ids_UL.to(policy.device), positions_UL)
        self.positions_R = positions_UL[:, -1] + 1

    def fork(self, fork_R: torch.Tensor) -> torch.Tensor:
        self.keep(fork_R)
        return self.logits_UV[fork_R]

    def keep(self, rows: torch.Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask_RK, self.positions_R = self.mask_RK[rows], self.positions_R[rows]

    def skip(self, tokens: int) -> None:
        """As :meth:`Forked.skip`, if all layers attend to everything; else nothing happens."""
        if all(isinstance(layer, _PreallocatedLayer) for layer in self.cache.layers):
            self.length += tokens
            for layer in self.cache.layers:
                layer.length += tokens

    def step(self, token_R: torch.Tensor) -> torch.Tensor:
        self.length += 1
        logits_RV = self._forward(token_R[:, None], self.positions_R[:, None])
        self.positions_R = self.positions_R + 1
        return logits_RV

    def _forward(self, ids_RN: torch.Tensor, positions_RN: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=ids_RN,
            attention_mask=self.mask_RK[:, : self.length],
            position_ids=positions_RN,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def _hits_stop(tokenizer, ids_t: torch.Tensor, stop: tuple[str, ...]) -> bool:
    # A stop string of n characters spans at most 4n byte-level tokens; decoding more would make long completions quadratic.
    tail = ids_t[-4 * max(len(s) for s in stop) - 4 :].tolist()
    text = tokenizer.decode(tail, skip_special_tokens=True)
    return any(s in text for s in stop)


class _PreallocatedLayer(DynamicLayer):
    """A full-attention cache layer that writes into a buffer allocated once, instead of concatenating at every token."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._room_for(key_states), self._room_for(value_states)
        self.is_initialized = True

    def _room_for(self, states: torch.Tensor) -> torch.Tensor:
        B, H, _, D = states.shape
        return states.new_empty(B, H, self.capacity, D)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(len(indices), *old.shape[1:])
            new[:, :, : self.length] = old[indices, :, : self.length]
            setattr(self, name, new)


def rollout_cache(config, capacity: int) -> DynamicCache:
    """A cache for ``capacity`` tokens: full-attention layers preallocated, all others as transformers makes them."""
    cache = DynamicCache(config=config)
    cache.layers = [_PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache

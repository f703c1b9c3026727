"""Problems to groups of sampled completions.

Each prompt is prefilled once, its cache forked G times; a token is drawn by inverting the CDF at a uniform number that was
fixed ahead by the row's own address; finished rows leave the batch instead of being decoded to the end of the longest.

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
        for wave in waves(rows, problems, sampling):
            uniforms_RT = None
            if sampling.temperature > 0:
                uniforms_RT = torch.stack(
                    [torch.rand(T, generator=generator(seed, purpose, step, problems[p].index, g)) for p, g in wave]
                )
            prompts = [problems[p].prompt_ids for p, _ in wave]
            drawn = _decode_wave(policy, prompts, uniforms_RT, sampling, on_tokens)
            completions.update(zip(wave, drawn, strict=True))
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


def _decode_wave(policy, prompts, uniforms_RT, sampling: Sampling, on_tokens) -> list[Completion]:
    """Prefill the distinct prompts of a wave, fork, decode until every row has ended."""
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
    device, T, R = policy.device, sampling.max_completion_length, len(prompts)
    decoder, logits_RV = prefill(policy, prompts, room=T)

    tokens_RT = torch.zeros(R, T, dtype=torch.long)
    logprobs_RT = torch.zeros(R, T)
    lengths = [T] * R
    finished = [False] * R
    eos = torch.tensor(policy.eos_ids, device=device)
    alive = list(range(R))  # the wave's row behind each row still in the batch
    live = torch.ones(R, dtype=torch.bool, device=device)  # rows in the batch that have not ended
    for t in range(T):
        u_R = None if uniforms_RT is None else uniforms_RT[alive, t]
        token_R, logprob_R = draw(logits_RV, u_R, sampling)
        tokens_RT[alive, t] = token_R.cpu()
        logprobs_RT[alive, t] = logprob_R.cpu()
        ended_R = torch.isin(token_R, eos) & live
        if sampling.stop:
            hit = [_hits_stop(policy.tokenizer, tokens_RT[row, : t + 1], sampling.stop) for row in alive]
            ended_R |= torch.tensor(hit, device=device) & live
        live = live & ~ended_R
        for r in ended_R.nonzero().flatten().tolist():
            lengths[alive[r]], finished[alive[r]] = t + 1, True
        num_live = int(live.sum())
        if on_tokens is not None:
            on_tokens(num_live + int(ended_R.sum()))
        if num_live == 0 or t == T - 1:
            break
        # Leaving costs a copy of the cache, staying a share of every later step; an eighth of the rows is worth it.
        if len(alive) - num_live >= max(len(alive) // 8, 1):
            keep = live.nonzero().flatten()
            alive = [alive[r] for r in keep.tolist()]
            decoder.keep(keep)
            token_R, live = token_R[keep], live[keep]
        logits_RV = decoder.step(token_R)
    return tokens_RT, logprobs_RT, lengths, finished


def _decode_captured(policy, prompts, uniforms_RT, sampling: Sampling, on_tokens) -> Drawn | None:
    """The same by :mod:`grpo.graphs`; None where that fails, or, looked at in the first wave, gives something else."""
    try:
        decoder, logits_RV = prefill(policy, prompts, room=sampling.max_completion_length)
        drawn = policy.graphs.decode(decoder.cache, decoder.positions_R, logits_RV, uniforms_RT, sampling, on_tokens)
        if not policy.graphs.checked:
            few = replace(sampling, max_completion_length=min(2 * LOOK_EVERY + 1, sampling.max_completion_length))
            expected = _decode(policy, prompts, uniforms_RT, few, None)
            if not _are_alike(drawn, expected):
                policy.without_graphs("they give other tokens than the same steps without")
                return None
            policy.graphs.checked = True
        return drawn
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel that cannot be captured, an operation that looks at a value
        policy.without_graphs((str(error).strip() or type(error).__name__).splitlines()[0])
        return None


def _are_alike(drawn: Drawn, expected: Drawn) -> bool:
    """Whether rows begin with the same tokens, and with log-probs that are off by rounding; one in eight may part sooner."""
    T = expected[0].shape[1]
    same_RT = (drawn[0][:, :T] == expected[0]).cumprod(dim=1).bool()
    lengths_R = torch.tensor(expected[2])
    written_RT = torch.arange(T) < lengths_R[:, None]
    close_RT = (drawn[1][:, :T] - expected[1]).abs() < 0.1
    parted_R = (~same_RT & written_RT).any(dim=1)
    return bool(close_RT[same_RT & written_RT].all()) and float(parted_R.float().mean()) <= 0.125


def prefill(policy, prompts: Sequence[tuple[int, ...]], room: int) -> tuple[Forked | Cached, torch.Tensor]:
    """A decoder with room for so many tokens of each row, each distinct prompt computed once; logits ``[R, V]`` of the first."""
    distinct = list(dict.fromkeys(prompts))
    fork_R = torch.tensor([distinct.index(prompt) for prompt in prompts], device=policy.device)
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

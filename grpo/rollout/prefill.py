"""Prompts computed once and forked, and one token after another for every row from there.

Two kinds, with the same methods: :class:`Forked` keeps a prompt in memory once for all its completions, :class:`Cached` works for any model.

Shapes: ``U`` prompts, ``R`` rows in flight, ``L`` padded prompt length, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from grpo.attention.forked import ForkedCache
from grpo.attention.packed import ATTENTION, forked_hidden, pack_prompts, packed_hidden


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
    """Each prompt in memory once, for all its completions (:mod:`grpo.attention.forked`): for models that can be packed."""

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

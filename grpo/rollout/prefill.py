"""The prefill, and two decoders that continue from it one token at a time: :class:`ForkedCacheDecoder`, with a prompt's
keys and values in memory once, for models that can be packed, and :class:`DynamicCacheDecoder` for others.

Shapes: ``U`` distinct prompts, ``R`` rows (completions) being decoded, ``L`` padded prompt length, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from grpo.attention import (
    ForkedCache,
    extended_hidden,
    forked_hidden,
    pack_prompts,
    packed_hidden,
    packing_enabled,
)
from grpo.attention.forked import select_rows
from grpo.model import Policy
from grpo.rollout.llama_decoder import LlamaDecoder


def prefill(
    policy: Policy, llama_decoder: LlamaDecoder | None, prompts: Sequence[tuple[int, ...]], capacity: int
) -> tuple[ForkedCacheDecoder | DynamicCacheDecoder, Tensor]:
    """Compute the prompt of each row, once for neighbouring rows with equal prompts.

    ``llama_decoder`` computes decode steps; None: the model's own modules do. ``capacity`` is the room for own tokens
    in the cache. Returns a decoder, and logits ``[R, V]`` of each row's first token.
    """
    groups = [(prompt, len(list(rows))) for prompt, rows in groupby(prompts)]
    distinct = [prompt for prompt, _ in groups]
    prompt_R = torch.tensor([u for u, (_, count) in enumerate(groups) for _ in range(count)], device=policy.device)
    if packing_enabled(policy.model):
        decoder = ForkedCacheDecoder(policy, llama_decoder, distinct, capacity)
    else:
        decoder = DynamicCacheDecoder(policy, distinct, capacity)
    return decoder, decoder.fork(prompt_R)


class ForkedCacheDecoder:
    """Decodes with each prompt's keys and values in memory once (:mod:`grpo.attention.forked`)."""

    def __init__(self, policy: Policy, llama_decoder: LlamaDecoder | None, prompts: Sequence, capacity: int):
        self.head, self.backbone = policy.model.get_output_embeddings(), policy.backbone
        self.hidden_of_token = llama_decoder or partial(forked_hidden, policy.backbone)
        packed = pack_prompts(prompts, policy.device)
        self.cache = ForkedCache([len(prompt) for prompt in prompts], capacity, policy.device, prompts)
        self.hidden_UH = packed_hidden(policy.backbone, packed, self.cache)[packed.before_M]
        self.positions_R = self.cache.prompt_lengths_U

    def fork(self, prompt_R: Tensor) -> Tensor:
        """Let row r continue prompt ``prompt_R[r]``; logits ``[R, V]`` of each row's first token."""
        self.cache.fork(prompt_R)
        self.positions_R = self.positions_R[prompt_R]
        return self.head(self.hidden_UH)[prompt_R]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self.cache.keep_rows(rows)
        self.positions_R = self.positions_R[rows]

    def split(self, rows: Tensor) -> ForkedCacheDecoder:
        """A decoder of these rows only, with copies of their keys and values."""
        part = copy.copy(self)
        part.cache, part.positions_R = self.cache.split(rows), self.positions_R[rows]
        return part

    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append several tokens to each row, by one forward pass; logits ``[R, V]`` of the next."""
        new_R = self.positions_R.new_tensor([len(row) for row in tokens])
        N = int(new_R.max())
        ids_RN = self.positions_R.new_tensor([[0] * (N - len(row)) + list(row) for row in tokens])
        positions_RN = self.positions_R[:, None] + torch.arange(N, device=new_R.device) - (N - new_R)[:, None]
        hidden_RNH = extended_hidden(self.backbone, ids_RN, positions_RN.clamp(min=0), new_R, self.cache)
        self.positions_R = self.positions_R + new_R
        return self.head(hidden_RNH[:, -1])

    def add_rows(self, other: ForkedCacheDecoder) -> None:
        """Append the rows of another decoder."""
        self.cache.add_rows(other.cache)
        self.positions_R = torch.cat([self.positions_R, other.positions_R])

    @property
    def is_full(self) -> bool:
        """True if :meth:`keep_rows` must free buffer space before the next token."""
        return self.cache.is_full

    def skip_tokens(self, count: int) -> None:
        """Advance by ``count`` arbitrary tokens, so that the next token takes as much memory as a late one."""
        self.cache.length += count

    def step(self, token_R: Tensor) -> Tensor:
        """Append one token to every row; logits ``[R, V]`` of the next."""
        hidden_RH = self.hidden_of_token(token_R, self.positions_R, self.cache)
        self.positions_R = self.positions_R + 1
        return self.head(hidden_RH)


class DynamicCacheDecoder:
    """Decodes with transformers' ``DynamicCache``: every row has its own copy of its prompt. For every model.

    Prompts are padded on the left, so that all rows continue at the same index. Rows cannot be added later.
    """

    is_full = False

    def __init__(self, policy: Policy, prompts: Sequence[tuple[int, ...]], capacity: int):
        self.model, self.length = policy.model, max(len(prompt) for prompt in prompts)
        L = self.length
        ids_UL = torch.full((len(prompts), L), policy.pad_id, dtype=torch.long)
        mask_UK = torch.ones(len(prompts), L + capacity, dtype=torch.bool)  # True for future tokens, too
        for u, prompt in enumerate(prompts):
            ids_UL[u, L - len(prompt) :] = torch.tensor(prompt)
            mask_UK[u, : L - len(prompt)] = False
        self.mask_RK = mask_UK.to(policy.device)
        self.cache = DynamicCache(config=policy.model.config)
        # Full-attention layers are preallocated; all others are transformers' own.
        layers = self.cache.layers
        self.cache.layers = [_PreallocatedLayer(L + capacity) if type(x) is DynamicLayer else x for x in layers]
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self.has_attention = any(isinstance(layer, DynamicLayer) for layer in self.cache.layers)
        positions_UL = (self.mask_RK[:, :L].long().cumsum(dim=1) - 1).clamp(min=0)
        self.logits_UV = self._forward(ids_UL.to(policy.device), positions_UL)
        self.positions_R = positions_UL[:, -1] + 1

    def fork(self, prompt_R: Tensor) -> Tensor:
        self.keep_rows(prompt_R)
        return self.logits_UV[prompt_R]

    def keep_rows(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)  # batch_select_indices does the same, but not for the states of linear attention
        self.mask_RK, self.positions_R = self.mask_RK[rows], self.positions_R[rows]

    def skip_tokens(self, count: int) -> None:
        """As :meth:`ForkedCacheDecoder.skip_tokens`, if all layers have full attention; otherwise nothing happens."""
        if all(isinstance(layer, _PreallocatedLayer) for layer in self.cache.layers):
            for counted in (self, *self.cache.layers):
                counted.length += count

    def step(self, token_R: Tensor) -> Tensor:
        self.length += 1
        logits_RV = self._forward(token_R[:, None], self.positions_R[:, None])
        self.positions_R = self.positions_R + 1
        return logits_RV

    def _forward(self, ids_RN: Tensor, positions_RN: Tensor) -> Tensor:
        inputs = {"input_ids": ids_RN, "position_ids": positions_RN, self.cache_name: self.cache}
        is_prefill = self.length == ids_RN.shape[1]
        if self.has_attention or is_prefill:  # Mamba would multiply its one new token by the mask of all tokens
            inputs["attention_mask"] = self.mask_RK[:, : self.length]
        return self.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]


class _PreallocatedLayer(DynamicLayer):
    """A full-attention cache layer with a buffer allocated once; transformers' own concatenates at every token."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        kind = key_states.device.type
        # Rotary embeddings leave fp32 keys, and autocast would cast all of them again at every token.
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else key_states.dtype
        self.device, self.is_initialized, both = key_states.device, True, (key_states, value_states)
        self.keys, self.values = (x.new_empty(*x.shape[:2], self.capacity, x.shape[3], dtype=self.dtype) for x in both)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, self.length = slice(self.length, self.length + key_states.shape[-2]), self.length + key_states.shape[-2]
        self.keys[:, :, new], self.values[:, :, new] = key_states, value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.keys, self.values = (select_rows(x, beam_idx, 0, self.length) for x in (self.keys, self.values))

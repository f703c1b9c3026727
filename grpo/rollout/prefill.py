"""The prefill, and two decoders that continue from it one token at a time.

:class:`ForkedCacheDecoder`, with a prompt's keys and values in memory once, is for models that can
be packed, :class:`DynamicCacheDecoder` for others.

Shapes: ``U`` distinct prompts, ``R`` rows (completions) being decoded, ``N`` new tokens of a row,
``K`` tokens of a row so far, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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
from grpo.rollout.cuda_graphs import CapturedSteps, CUDAGraphs
from grpo.rollout.llama_decoder import LlamaDecoder

Prompts = Sequence[tuple[int, ...]]
"""Token ids of prompts. Where each row has one, rows of one group are neighbours."""


def prefill(
    policy: Policy,
    llama_decoder: LlamaDecoder | None,
    prompts: Prompts,
    capacity: int,
    graphs: CUDAGraphs | None = None,
) -> tuple[Decoder, Tensor]:
    """Compute the prompt of each row, once for neighbouring rows with equal prompts.

    ``llama_decoder`` computes decode steps, captured in ``graphs``; None: the model's own modules
    do. ``capacity`` is the most own tokens of a row in the cache. Returns a decoder, and logits
    ``[R, V]`` of each row's first token.
    """
    distinct = []
    prompt_of_row = []
    for prompt, rows in groupby(prompts):
        prompt_of_row += [len(distinct) for _ in rows]
        distinct.append(prompt)

    if packing_enabled(policy.model):
        decoder = ForkedCacheDecoder(policy, distinct, capacity)
        if llama_decoder is not None:
            decoder.hidden_of_token = llama_decoder
            if graphs is not None and graphs.are_on:
                decoder.hidden_of_token = CapturedSteps(llama_decoder, graphs)
                decoder.least_ended = 0.75
    else:
        decoder = DynamicCacheDecoder(policy, distinct, capacity)

    prompt_R = torch.tensor(prompt_of_row, device=policy.device)
    decoder.fork(prompt_R)
    return decoder, decoder.logits_UV[prompt_R]


class ForkedCacheDecoder:
    """Decodes with each prompt's keys and values in memory once (:mod:`grpo.attention.forked`)."""

    least_ended = 0.125
    """Ended rows are taken out, which copies the cache, when they are this share of all rows."""

    def __init__(
        self,
        policy: Policy,
        prompts: Prompts,
        capacity: int,
    ):
        self.head = policy.model.get_output_embeddings()
        self.backbone = policy.backbone
        self.hidden_of_token = partial(forked_hidden, policy.backbone)

        lengths = [len(prompt) for prompt in prompts]
        self.cache = ForkedCache(lengths, capacity, policy.device, prompts)
        packed = pack_prompts(prompts, policy.device)
        hidden = packed_hidden(policy.backbone, packed, self.cache)

        self.logits_UV = self.head(hidden[packed.before_M])
        """Logits of the first token after each prompt."""
        self.positions_R = self.cache.prompt_lengths_U
        """Position of each row's next token."""

    def fork(self, prompt_R: Tensor) -> None:
        """Let row r continue prompt ``prompt_R[r]``."""
        self.cache.fork(prompt_R)
        self.positions_R = self.positions_R[prompt_R]

    @property
    def is_full(self) -> bool:
        """True if :meth:`keep_rows` must free buffer space before the next token."""
        return self.cache.is_full

    def step(self, token_R: Tensor) -> Tensor:
        """Append one token to every row; logits ``[R, V]`` of the next."""
        hidden_RH = self.hidden_of_token(token_R, self.positions_R, self.cache)
        self.positions_R = self.positions_R + 1
        return self.head(hidden_RH)

    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append several tokens to each row, by one forward pass; logits ``[R, V]`` of the next."""
        ids_RN, padding_R = _padded_left(tokens, 0, self.positions_R.device)
        N = ids_RN.shape[1]
        first_R = self.positions_R - padding_R
        index_N = torch.arange(N, device=first_R.device)
        positions_RN = first_R[:, None] + index_N
        new_R = N - padding_R
        hidden_RNH = extended_hidden(
            self.backbone,
            ids_RN,
            positions_RN.clamp(min=0),
            new_R,
            self.cache,
        )
        self.positions_R = self.positions_R + new_R
        return self.head(hidden_RNH[:, -1])

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self.cache.keep_rows(rows)
        self.positions_R = self.positions_R[rows]

    def split(self, rows: Tensor) -> ForkedCacheDecoder:
        """A decoder of these rows only, with copies of their keys and values."""
        part = copy.copy(self)
        part.cache = self.cache.split(rows)
        part.positions_R = self.positions_R[rows]
        return part

    def add_rows(self, other: ForkedCacheDecoder) -> None:
        """Append the rows of another decoder."""
        self.cache.add_rows(other.cache)
        self.positions_R = torch.cat([self.positions_R, other.positions_R])

    def skip_tokens(self, count: int) -> None:
        """Advance by ``count`` arbitrary tokens: the next takes as much memory as a late one."""
        self.cache.length += count


class DynamicCacheDecoder:
    """Decodes with transformers' ``DynamicCache``, in which every row has a copy of its prompt.

    It decodes every model. Prompts are padded on the left, so that all rows continue at the same
    index. Rows cannot be added later.
    """

    is_full = False
    least_ended = ForkedCacheDecoder.least_ended

    def __init__(self, policy: Policy, prompts: Prompts, capacity: int):
        self.model = policy.model
        ids_UN, self.padding_R = _padded_left(prompts, policy.pad_id, policy.device)
        self.length = 0
        """Tokens in the cache for each row, with padding."""

        self.cache = DynamicCache(config=policy.model.config)
        self.has_attention = False
        for number, layer in enumerate(self.cache.layers):
            self.has_attention |= isinstance(layer, DynamicLayer)
            # A layer with a window, or a state in place of keys, is a subclass or another class.
            if type(layer) is DynamicLayer:
                width = ids_UN.shape[1] + capacity
                self.cache.layers[number] = _PreallocatedLayer(width)
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"

        self.logits_UV = self._forward(ids_UN)

    def step(self, token_R: Tensor) -> Tensor:
        """As :meth:`ForkedCacheDecoder.step`."""
        return self._forward(token_R[:, None])

    def fork(self, prompt_R: Tensor) -> None:
        """As :meth:`ForkedCacheDecoder.fork`."""
        self.keep_rows(prompt_R)

    def keep_rows(self, rows: Tensor) -> None:
        """As :meth:`ForkedCacheDecoder.keep_rows`."""
        # ``batch_select_indices`` does the same, but not for the states of linear attention.
        self.cache.reorder_cache(rows)
        self.padding_R = self.padding_R[rows]

    def skip_tokens(self, count: int) -> None:
        """As :meth:`ForkedCacheDecoder.skip_tokens`, if all layers have full attention."""
        layers = self.cache.layers
        if all(isinstance(layer, _PreallocatedLayer) for layer in layers):
            self.length += count
            for layer in layers:
                layer.length += count

    def _forward(self, ids_RN: Tensor) -> Tensor:
        """Append tokens to every row; logits ``[R, V]`` of the next."""
        start = self.length
        self.length += ids_RN.shape[1]
        index_K = torch.arange(self.length, device=ids_RN.device)
        index_RK = index_K - self.padding_R[:, None]  # negative at padding
        # Mamba would multiply its one new token by the mask of all tokens.
        needs_mask = self.has_attention or start == 0
        out = self.model(
            input_ids=ids_RN,
            attention_mask=index_RK >= 0 if needs_mask else None,
            position_ids=index_RK[:, start:].clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        return out.logits[:, -1]


Decoder = ForkedCacheDecoder | DynamicCacheDecoder


class _PreallocatedLayer(DynamicLayer):
    """A full-attention cache layer with buffers allocated once.

    Transformers' own layer concatenates at every token, which takes a sixth of a rollout in fp32
    and a third in bf16.
    """

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args,
        **kwargs,
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.keys = self._buffer(key_states)
            self.values = self._buffer(value_states)
            self.is_initialized = True
        start = self.length
        self.length += key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        keys = self.keys[:, :, : self.length]
        values = self.values[:, :, : self.length]
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows. Transformers' own method would copy the indices without tokens, too."""
        self.keys = select_rows(self.keys, beam_idx, 0, self.length)
        self.values = select_rows(self.values, beam_idx, 0, self.length)

    def _buffer(self, states: Tensor) -> Tensor:
        dtype = states.dtype
        kind = states.device.type
        if torch.is_autocast_enabled(kind):
            # Rotary embeddings leave fp32 keys, all of which attention would cast at every token.
            dtype = torch.get_autocast_dtype(kind)
        R, H, _, D = states.shape
        return states.new_empty(R, H, self.capacity, D, dtype=dtype)

    def get_seq_length(self) -> int:
        return self.length


def _padded_left(
    sequences: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Token ids ``[R, N]``, and the number of padding tokens before each row, ``[R]``."""
    rows = [torch.tensor(sequence) for sequence in sequences]
    ids_RN = pad_sequence(
        rows,
        batch_first=True,
        padding_value=pad_id,
        padding_side="left",
    )
    padding = [ids_RN.shape[1] - len(row) for row in rows]
    return ids_RN.to(device), torch.tensor(padding, device=device)

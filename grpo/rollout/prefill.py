"""The prefill, and two decoders that continue from it one token at a time.

:class:`ForkedCacheDecoder`, with a prompt's keys and values in memory once, is for models that can
be packed, :class:`DynamicCacheDecoder` for others.

Shapes: ``U`` distinct prompts, ``R`` rows (completions) being decoded, ``N`` new tokens of a row,
``K`` tokens of a row so far, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from grpo.attention import (
    ForkedCache,
    forked_hidden,
    pack_prompts,
    packed_hidden,
    packing_enabled,
)
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

    prompt_R = torch.tensor(prompt_of_row, device=policy.device)
    if not packing_enabled(policy.model):
        decoder = DynamicCacheDecoder(policy, distinct)
        decoder.keep_rows(prompt_R)
        return decoder, decoder.logits_UV[prompt_R]

    decoder = ForkedCacheDecoder(policy, llama_decoder, distinct, capacity)
    packed = pack_prompts(distinct, policy.device)
    hidden = packed_hidden(policy.backbone, packed, decoder)
    logits_UV = decoder.head(hidden[packed.before_M])
    decoder.fork(prompt_R)
    if llama_decoder and graphs and graphs.are_on:
        decoder.llama_decoder = CapturedSteps(llama_decoder, graphs)
        decoder.least_ended = 0.75
    return decoder, logits_UV[prompt_R]


class ForkedCacheDecoder(ForkedCache):
    """Decodes with each prompt's keys and values in memory once."""

    least_ended = 0.125
    """Ended rows are taken out, which copies the cache, when they are this share of all rows."""

    def __init__(
        self,
        policy: Policy,
        llama_decoder: LlamaDecoder | CapturedSteps | None,
        prompts: Prompts,
        capacity: int,
    ):
        super().__init__(prompts, capacity, policy.device)
        self.head = policy.model.get_output_embeddings()
        self.backbone = policy.backbone
        self.llama_decoder = llama_decoder

    def step(self, token_R: Tensor) -> Tensor:
        """Append one token to every row; logits ``[R, V]`` of the next."""
        if self.llama_decoder is not None:
            return self.head(self.llama_decoder(token_R, self))
        positions_R = self.begin_token()
        hidden_R1H = forked_hidden(
            self.backbone,
            token_R[:, None],
            positions_R[:, None],
            self,
        )
        return self.head(hidden_R1H[:, 0])

    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append several tokens to each row, by one forward pass; logits ``[R, V]`` of the next."""
        ids_RN, padding_R = _padded_left(tokens, self.start_R.device)
        positions_RN = self.begin_tokens(ids_RN.shape[1] - padding_R)
        hidden_RNH = forked_hidden(self.backbone, ids_RN, positions_RN, self)
        return self.head(hidden_RNH[:, -1])


class DynamicCacheDecoder:
    """Decodes with transformers' ``DynamicCache``, in which every row has a copy of its prompt.

    It decodes every model. Prompts are padded on the left, so that all rows continue at the same
    index. Rows cannot be added later.
    """

    is_full = False
    least_ended = ForkedCacheDecoder.least_ended

    def __init__(self, policy: Policy, prompts: Prompts):
        self.model = policy.model
        ids_UN, self.padding_R = _padded_left(prompts, policy.device)
        self.length = 0
        """Tokens in the cache for each row, with padding."""
        self.cache = DynamicCache(config=policy.model.config)
        self.logits_UV = self._forward(ids_UN)

    def step(self, token_R: Tensor) -> Tensor:
        """As :meth:`ForkedCacheDecoder.step`."""
        return self._forward(token_R[:, None])

    def keep_rows(self, rows: Tensor) -> None:
        """As :meth:`ForkedCache.keep_rows`."""
        # ``batch_select_indices`` does the same, but not for the states of linear attention.
        self.cache.reorder_cache(rows)
        self.padding_R = self.padding_R[rows]

    def _forward(self, ids_RN: Tensor) -> Tensor:
        """Append tokens to every row; logits ``[R, V]`` of the next."""
        start = self.length
        self.length += ids_RN.shape[1]
        index_K = torch.arange(self.length, device=ids_RN.device)
        index_RK = index_K - self.padding_R[:, None]  # negative at padding
        out = self.model(
            input_ids=ids_RN,
            attention_mask=index_RK >= 0,
            position_ids=index_RK[:, start:].clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


Decoder = ForkedCacheDecoder | DynamicCacheDecoder


def _padded_left(
    sequences: Sequence[Sequence[int]],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Token ids ``[R, N]``, and the number of padding tokens before each row, ``[R]``."""
    rows = [torch.tensor(sequence) for sequence in sequences]
    ids_RN = pad_sequence(rows, batch_first=True, padding_side="left")
    padding = [ids_RN.shape[1] - len(row) for row in rows]
    return ids_RN.to(device), torch.tensor(padding, device=device)

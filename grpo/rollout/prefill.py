"""The prefill, which computes prompts, and two decoders that continue them one token at a time.

The prefill packs all prompts into one row (:mod:`grpo.attention.layout`), in which each prompt is
computed once for all its completions. :class:`ForkedCacheDecoder` then holds each prompt's keys and
values once. Models that cannot be packed are decoded by :class:`DynamicCacheDecoder`.

R   rows: completions being decoded       N   new tokens of a row
U   distinct prompts                      K   tokens of a row so far, with padding
H   size of a hidden state                V   vocabulary
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
"""Token ids of prompts: one prompt per group, or one per row, where the rows of a group are
neighbours."""


def prefill(
    policy: Policy,
    llama_decoder: LlamaDecoder | None,
    prompts: Prompts,
    capacity: int,
    graphs: CUDAGraphs | None = None,
) -> tuple[Decoder, Tensor]:
    """Compute the prompt of each row, once for neighbouring rows with equal prompts.

    Args:
        llama_decoder: computes decode steps. If None, the model's modules compute them.
        prompts: the prompt of each row.
        capacity: number of a row's completion tokens for which the KV cache has room.
        graphs: captures the steps of ``llama_decoder`` in CUDA graphs. Default: the operations of a
            step are launched one after the other.

    Returns:
        A decoder of the rows, and logits ``[R, V]`` of each row's first completion token.
    """
    # Rows of a group are neighbours. Equal prompts of groups that are not neighbours are rare, so
    # it does no harm that each of these prompts is computed.
    distinct = []
    prompt_of_row = []
    for prompt, rows in groupby(prompts):
        prompt_of_row += [len(distinct) for _ in rows]
        distinct.append(prompt)

    prompt_R = torch.tensor(prompt_of_row, device=policy.device)
    if not packing_enabled(policy.model):
        decoder = DynamicCacheDecoder(policy, distinct)
        decoder.keep_rows(prompt_R)  # a copy of the prompt's keys and values for each of its rows
        return decoder, decoder.logits_UV[prompt_R]

    decoder = ForkedCacheDecoder(policy, llama_decoder, distinct, capacity)
    packed = pack_prompts(distinct, policy.device)
    hidden_NH = packed_hidden(policy.backbone, packed, decoder)
    # The head is the largest layer, and only the last token of a prompt needs its logits.
    logits_UV = decoder.head(hidden_NH[packed.predictor_M])
    decoder.fork(prompt_R)
    if llama_decoder and graphs and graphs.are_on:
        decoder.llama_decoder = CapturedSteps(llama_decoder, graphs)
        # When rows leave, the step is captured anew, which takes as long as many steps.
        decoder.min_ended_fraction = 0.75
    return decoder, logits_UV[prompt_R]


class ForkedCacheDecoder(ForkedCache):
    """Decodes with each prompt's keys and values in memory once."""

    min_ended_fraction = 0.125
    """Fraction of a batch's rows that must be inactive before the decode loop drops them. Dropping
    rows copies the cache."""

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
        """Append one token to every row. Returns logits ``[R, V]`` of the next token."""
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
        """Append several tokens to each row by one forward pass.

        Returns logits ``[R, V]`` of the next token.
        """
        # Padded on the left, so that the last token of every row is at the same index.
        ids_RN, padding_R = _pad_left(tokens, self.start_R.device)
        num_new_R = ids_RN.shape[1] - padding_R
        positions_RN = self.begin_tokens(num_new_R)
        hidden_RNH = forked_hidden(self.backbone, ids_RN, positions_RN, self)
        return self.head(hidden_RNH[:, -1])


class DynamicCacheDecoder:
    """Decodes with transformers' ``DynamicCache``, in which every row has a copy of its prompt.

    This works for every model, but rows cannot be added later.
    """

    is_full = False
    min_ended_fraction = ForkedCacheDecoder.min_ended_fraction

    def __init__(self, policy: Policy, prompts: Prompts):
        self.model = policy.model
        # Padded on the left, so that all rows continue at the same index of the cache.
        ids_UN, self.padding_R = _pad_left(prompts, policy.device)
        self.length = 0
        """Number of tokens of each row in the cache, including padding."""
        self.cache = DynamicCache(config=policy.model.config)
        self.logits_UV = self._forward(ids_UN)

    def step(self, token_R: Tensor) -> Tensor:
        """Append one token to every row. Returns logits ``[R, V]`` of the next token."""
        return self._forward(token_R[:, None])

    def keep_rows(self, rows: Sequence[int] | Tensor) -> None:
        """Keep only the given rows. A row that is given several times is copied."""
        rows = torch.as_tensor(rows, device=self.padding_R.device)
        # ``batch_select_indices`` does the same, but not for the states of linear attention.
        self.cache.reorder_cache(rows)
        self.padding_R = self.padding_R[rows]

    def _forward(self, ids_RN: Tensor) -> Tensor:
        """Append tokens to every row. Returns logits ``[R, V]`` of the next token."""
        N = ids_RN.shape[1]
        self.length += N
        # A token's position is its index behind the padding, as if the row were alone.
        index_K = torch.arange(self.length, device=ids_RN.device)
        position_RK = index_K - self.padding_R[:, None]
        out = self.model(
            input_ids=ids_RN,
            attention_mask=position_RK >= 0,
            position_ids=position_RK[:, -N:].clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


Decoder = ForkedCacheDecoder | DynamicCacheDecoder


def _pad_left(
    sequences: Sequence[Sequence[int]],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return padded token ids ``[R, N]``, and the number ``[R]`` of padding tokens in each row."""
    rows = [torch.tensor(sequence) for sequence in sequences]
    ids_RN = pad_sequence(rows, batch_first=True, padding_side="left")
    padding = [ids_RN.shape[1] - len(row) for row in rows]
    return ids_RN.to(device), torch.tensor(padding, device=device)

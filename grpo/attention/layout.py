"""The layout of a micro-batch as one packed row of tokens: each group's prompt once, then the completions, unpadded.

Completions are sorted by length into *tiles*. The tokens of a tile are neighbours in the row, and their attention is
one kernel call.

Shapes: ``B`` rows of the micro-batch, ``S`` their padded length, ``N`` tokens of the packed row, ``M`` scored tokens,
``U`` prompts, ``P`` longest prompt, ``R`` rows of a tile, ``C`` longest row of the tile, ``n`` tokens of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Consecutive tokens of the packed row with one kernel call: all prompts, or completions of similar length."""

    rows: int
    width: int
    """Tokens of the longest row."""
    slots_n: Tensor | None
    """Index of each token in the padded ``[rows * width]`` tensor; None if all rows are equally long."""
    prompt_R: Tensor | None = None
    """Index of the prompt that each completion continues; None for the tile of the prompts."""
    prompt_lengths_R: Tensor | None = None
    """Tokens of that prompt."""

    def visible_RCS(self, P: int) -> Tensor:
        """``[R, C, P + C]`` True where a completion's token may attend: to its prompt and its own tokens up to itself.

        ``P``: tokens of the longest prompt of the row.
        """
        R, C, device = self.rows, self.width, self.prompt_R.device
        sees_prompt_RP = torch.arange(P, device=device) < self.prompt_lengths_R[:, None]
        causal_CC = torch.ones(C, C, dtype=torch.bool, device=device).tril()
        return torch.cat([sees_prompt_RP[:, None, :].expand(R, C, P), causal_CC.expand(R, C, C)], dim=-1)

    def pad(self, x_nHD: Tensor) -> Tensor:
        """``[n, H, D]`` to ``[R, C, H, D]``, zeros at the padding."""
        if self.slots_n is not None:
            zeros = x_nHD.new_zeros(self.rows * self.width, *x_nHD.shape[1:])
            x_nHD = zeros.index_copy_(0, self.slots_n, x_nHD)
        return x_nHD.unflatten(0, (self.rows, self.width))

    def unpad(self, x_RCHD: Tensor) -> Tensor:
        """``[R, C, H, D]`` to ``[n, H, D]``."""
        flat = x_RCHD.flatten(0, 1)
        return flat if self.slots_n is None else _GatherRows.apply(flat, self.slots_n)


@dataclass(frozen=True)
class PackedLayout:
    """The packed row: all prompts, then the completions, tile by tile, without last tokens, which predict nothing."""

    ids_1N: Tensor
    positions_1N: Tensor
    before_M: Tensor
    """Index in the row of the token before each scored token, whose logits score it, in the order of the batch."""
    tiles: tuple[Tile, ...]
    """The tile of the prompts first."""
    sizes: tuple[int, ...]
    """Tokens of each tile, and of the padding at the end of the row."""
    lengths: tuple[int, ...]
    """Tokens of each prompt and of each completion, in the order of the row."""
    prompts: tuple[int, ...]
    """Number of the prompt of each."""
    masks: dict[Any, Any] = field(default_factory=dict)
    """Attention masks, built by the first layer and used by all."""


def pack(
    sequence_ids_BS: Tensor, prompt_lengths_B: Sequence[int], lengths_B: Sequence[int], groups_B: Sequence[int]
) -> PackedLayout:
    """Pack the rows of a micro-batch, on its device.

    Args:
        sequence_ids_BS: ``[B, S]`` prompt, then completion, then padding.
        prompt_lengths_B: tokens of each prompt.
        lengths_B: tokens of each completion.
        groups_B: rows with the same number have the same prompt.
    """
    device, S = sequence_ids_BS.device, sequence_ids_BS.shape[1]
    prompt_of_group = {group: u for u, group in enumerate(dict.fromkeys(groups_B))}
    prompt_B = [prompt_of_group[group] for group in groups_B]
    row_of_prompt = {u: b for b, u in enumerate(prompt_B)}  # any row of its group
    lengths_U = torch.tensor([prompt_lengths_B[b] for b in row_of_prompt.values()])

    # (row of the batch, first token, end) of each run of tokens, in the packed order
    spans = [(b, 0, prompt_lengths_B[b]) for b in row_of_prompt.values()]
    tiles, sizes = [_tile(lengths_U.tolist(), device)], [int(lengths_U.sum())]
    start_of_completion, end = {}, sizes[0]
    for rows in _similar_lengths([max(n - 1, 0) for n in lengths_B]):
        lengths_R = [lengths_B[b] - 1 for b in rows]
        tiles.append(_tile(lengths_R, device, torch.tensor([prompt_B[b] for b in rows]), lengths_U))
        sizes.append(sum(lengths_R))
        for b, length in zip(rows, lengths_R, strict=True):
            spans.append((b, prompt_lengths_B[b], prompt_lengths_B[b] + length))
            start_of_completion[b] = end
            end += length

    last_U = lengths_U.cumsum(0) - 1
    before = [last_U[:0]]
    for b, (u, length) in enumerate(zip(prompt_B, lengths_B, strict=True)):
        if length:
            before += [last_U[u : u + 1], torch.arange(length - 1) + start_of_completion.get(b, 0)]
    source_N = torch.cat([torch.arange(b * S + start, b * S + end) for b, start, end in spans])
    positions_N = torch.cat([torch.arange(start, end) for _, start, end in spans])
    ids_N = sequence_ids_BS.flatten()[source_N.to(device)]
    prompts = [prompt_B[b] for b, *_ in spans]
    lengths = [end - start for _, start, end in spans]
    return _padded(ids_N, positions_N.to(device), torch.cat(before).to(device), tiles, sizes, lengths, prompts)


def pack_prompts(prompts: Sequence[Sequence[int]], device: torch.device | str) -> PackedLayout:
    """Prompts without completions, for the prefill; ``before_M`` is the last token of each."""
    lengths = [len(prompt) for prompt in prompts]
    ids_N = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    positions_N = torch.cat([torch.arange(n) for n in lengths]).to(device)
    last_U = torch.tensor(lengths).cumsum(0).sub(1).to(device)
    return _padded(ids_N, positions_N, last_U, [_tile(lengths, device)], [sum(lengths)], lengths, range(len(lengths)))


def few_sizes(size: int) -> int:
    """The size rounded up to one of 16 sizes per power of two, at most 1/16 larger: kernels are made for few shapes."""
    step = 1 << max((size - 1).bit_length() - 5, 0)
    return -(-size // step) * step


def _padded(
    ids_N, positions_N, before_M, tiles: list[Tile], sizes: list[int], lengths: list[int], prompts: Sequence[int]
) -> PackedLayout:
    """The layout, with padding tokens at the end of the row so that rows have few different lengths."""
    padding = few_sizes(len(ids_N)) - len(ids_N)
    ids_1N, positions_1N = (F.pad(x, (0, padding))[None, :] for x in (ids_N, positions_N))
    all_sizes = (*sizes, padding)
    return PackedLayout(ids_1N, positions_1N, before_M, tuple(tiles), all_sizes, tuple(lengths), tuple(prompts))


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Nonempty rows, longest first, in tiles of lengths of at least 3/4 of the longest, or of the longest - 16."""
    tiles: list[list[int]] = []
    for b in sorted((b for b, length in enumerate(lengths) if length), key=lambda b: -lengths[b]):
        if not tiles or lengths[b] < min(0.75 * lengths[tiles[-1][0]], lengths[tiles[-1][0]] - 16):
            tiles.append([])
        tiles[-1].append(b)
    return tiles


def _tile(lengths_R: list[int], device: torch.device | str, prompt_R=None, prompt_lengths_U=None) -> Tile:
    """A tile of completions, or, without ``prompt_R``, of the prompts."""
    R, C = len(lengths_R), max(lengths_R)
    slots_n = None
    if min(lengths_R) < C:
        slots_n = torch.cat([torch.arange(r * C, r * C + n) for r, n in enumerate(lengths_R)]).to(device)
    if prompt_R is None:
        return Tile(R, C, slots_n)
    return Tile(R, C, slots_n, prompt_R.to(device), prompt_lengths_U[prompt_R].to(device))


class _GatherRows(torch.autograd.Function):
    """Take the rows at distinct indices. The gradient is a copy, where PyTorch's would add up rows one by one."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.size = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None

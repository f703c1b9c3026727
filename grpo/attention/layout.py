"""The layout of a micro-batch as one packed row: each prompt once, then the completions, unpadded.

Completions are sorted by length into *tiles*. The tokens of a tile are neighbours in the row, and
their attention is one kernel call.

Shapes: ``B`` rows of the micro-batch, ``S`` their padded length, ``N`` tokens of the packed row,
``M`` scored tokens, ``U`` prompts, ``P`` longest prompt, ``R`` rows of a tile, ``C`` longest row of
the tile, ``n`` tokens of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Tile:
    """Consecutive tokens with one kernel call: all prompts, or completions of similar length."""

    width: int
    """Tokens of the longest of them."""
    slots_n: Tensor | None
    """Index of each token in the padded ``[rows * width]`` tensor; None if nothing is padded."""
    prompt_R: Tensor
    """Index of the prompt that each row is or continues."""

    def pad(self, x_nHD: Tensor) -> Tensor:
        """``[n, H, D]`` to ``[R, H, C, D]``, zeros at the padding."""
        R = len(self.prompt_R)
        if self.slots_n is not None:
            num_slots = R * self.width
            zeros = x_nHD.new_zeros(num_slots, *x_nHD.shape[1:])
            x_nHD = zeros.index_copy_(0, self.slots_n, x_nHD)
        return x_nHD.unflatten(0, (R, self.width)).transpose(1, 2)

    def unpad(self, x_RHCD: Tensor) -> Tensor:
        """``[R, H, C, D]`` to ``[n, H, D]``."""
        flat = x_RHCD.transpose(1, 2).flatten(0, 1)
        return flat if self.slots_n is None else flat.index_select(0, self.slots_n)


@dataclass(frozen=True)
class PackedLayout:
    """The packed row: all prompts, then the completions, tile by tile.

    The last tokens of completions are left out, since they predict nothing.
    """

    ids_1N: Tensor
    positions_1N: Tensor
    before_M: Tensor
    """Index of the token before each scored token, in the order of the batch. Its logits score the
    token."""
    tiles: list[Tile]
    """The tile of the prompts first."""
    sizes: list[int]
    """Tokens of each tile, and of the padding at the end of the row."""
    prompt_lengths_U: Tensor
    masks: dict[Any, Tensor] = field(default_factory=dict)
    """Attention masks, built by the first layer and used by all layers."""

    def visible_RCS(self, tile: Tile) -> Tensor:
        """``[R, C, P + C]`` True where a completion's token may attend.

        Those are the tokens of its prompt, and of its completion up to itself.
        """
        P = self.tiles[0].width
        index_S = torch.arange(P + tile.width, device=tile.prompt_R.device)
        prompt_lengths_R = self.prompt_lengths_U[tile.prompt_R]
        is_prompt_RS = index_S < prompt_lengths_R[:, None]
        is_completion_S = index_S >= P
        is_earlier_CS = index_S <= index_S[P:, None]
        return is_prompt_RS[:, None] | (is_completion_S & is_earlier_CS)


def pack(
    sequence_ids_BS: Tensor,
    prompt_lengths_B: Sequence[int],
    lengths_B: Sequence[int],
    groups_B: Sequence[int],
) -> PackedLayout:
    """Pack the rows of a micro-batch, on its device.

    Args:
        sequence_ids_BS: ``[B, S]`` prompt, then completion, then padding.
        prompt_lengths_B: tokens of each prompt.
        lengths_B: tokens of each completion.
        groups_B: rows with the same number have the same prompt.
    """
    device = sequence_ids_BS.device
    S = sequence_ids_BS.shape[1]
    B = len(groups_B)
    row_of_group = dict(zip(groups_B, range(B), strict=True))  # any row of each group
    prompt_of_group = {group: u for u, group in enumerate(row_of_group)}
    prompt_lengths = [prompt_lengths_B[b] for b in row_of_group.values()]
    U = len(prompt_lengths)
    all_but_last = [length - 1 for length in lengths_B]

    tiles = [_tile(prompt_lengths, range(U), device)]
    sizes = [sum(prompt_lengths)]
    sources = []  # indices in the flat batch, in the packed order
    for b in row_of_group.values():
        sources.append(b * S + torch.arange(prompt_lengths_B[b]))
    start_B = [0] * B  # index of each completion in the packed row
    end = sizes[0]
    for rows in _similar_lengths(all_but_last):
        lengths = [all_but_last[b] for b in rows]
        prompts = [prompt_of_group[groups_B[b]] for b in rows]
        tiles.append(_tile(lengths, prompts, device))
        sizes.append(sum(lengths))
        for b in rows:
            first = b * S + prompt_lengths_B[b]
            sources.append(first + torch.arange(all_but_last[b]))
            start_B[b] = end
            end += all_but_last[b]

    end_U = torch.tensor(prompt_lengths).cumsum(0)
    before = [end_U[:0]]
    for b, group in enumerate(groups_B):
        if lengths_B[b]:
            # The last token of a prompt scores the first one of a completion.
            before.append(end_U[prompt_of_group[group]].view(1) - 1)
            before.append(start_B[b] + torch.arange(all_but_last[b]))

    source_N = torch.cat(sources).to(device)
    id_N = sequence_ids_BS.flatten()[source_N]
    position_N = source_N % S
    padding = round_up_to_bucket(len(id_N)) - len(id_N)
    sizes.append(padding)
    return PackedLayout(
        ids_1N=F.pad(id_N, (0, padding))[None],
        positions_1N=F.pad(position_N, (0, padding))[None],
        before_M=torch.cat(before).to(device),
        tiles=tiles,
        sizes=sizes,
        prompt_lengths_U=torch.tensor(prompt_lengths, device=device),
    )


def pack_prompts(prompts: Sequence[Sequence[int]], device: torch.device | str) -> PackedLayout:
    """Pack prompts for the prefill; ``before_M`` is the last token of each."""
    U = len(prompts)
    lengths = [len(prompt) for prompt in prompts]
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids_BS = pad_sequence(rows, batch_first=True).to(device)
    # As if each had a completion of one token, which is left out.
    return pack(ids_BS, lengths, [1] * U, range(U))


def round_up_to_bucket(size: int) -> int:
    """The size rounded up to one of 16 per power of two, at most 1/16 larger.

    On the CPU, oneDNN keeps a kernel and its working memory for each shape.
    """
    step = 1 << max((size - 1).bit_length() - 5, 0)
    return -(-size // step) * step


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Rows with tokens, longest first, in tiles.

    The shortest row of a tile has at least 3/4 of the tokens of the longest, or at most 16 fewer.
    """
    tiles: list[list[int]] = []
    shortest = 0
    longest_first = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    for b in longest_first:
        if lengths[b] <= 0:
            break
        if not tiles or lengths[b] < shortest:
            tiles.append([])
            shortest = min(0.75 * lengths[b], lengths[b] - 16)
        tiles[-1].append(b)
    return tiles


def _tile(
    lengths: Sequence[int],
    prompts: Sequence[int],
    device: torch.device,
) -> Tile:
    """A tile of rows with these lengths, and the index of the prompt of each."""
    C = max(lengths)
    slots_n = None
    if min(lengths) < C:
        slots = [torch.arange(length) + r * C for r, length in enumerate(lengths)]
        slots_n = torch.cat(slots).to(device)
    return Tile(
        width=C,
        slots_n=slots_n,
        prompt_R=torch.tensor(prompts, device=device),
    )

"""The layout of a micro-batch as one packed row: each prompt once, then all completions, unpadded.

All completions of a group share the hidden states of their prompt, as in Prefix Grouper (Liu et al.
2025, arXiv:2506.05433). For prompts ``A`` and ``B``, and completions ``a`` and ``d`` of ``A`` and
``b`` of ``B``, the row and the tokens that each token attends to (``x``) are::

          A A A B B a a a b b b d
    A     x . . . . . . . . . . .        A prompt's token attends to the prompt up to itself.
    A     x x . . . . . . . . . .
    A     x x x . . . . . . . . .
    B     . . . x . . . . . . . .
    B     . . . x x . . . . . . .
    a     x x x . . x . . . . . .        A completion's token attends to its whole prompt, and
    a     x x x . . x x . . . . .        to the completion up to itself.
    a     x x x . . x x x . . . .
    b     . . . x x . . . x . . .
    ...

Tokens with which all prompts begin, such as a system prompt and examples, are in the row once: with
``A A s`` and ``A A t`` for prompts, the row begins with ``A A s t``. Their hidden states are the
same for all prompts, since a token attends to earlier tokens only. Attention alone computes them
for each prompt.

Completions are sorted by length, the longest first, and cut into *tiles* of similar length. The
attention of a tile is one kernel call, for which completions are padded to the longest in the tile.

B   rows of the micro-batch               U   prompts, one per group
S   padded length of these rows           P   tokens of the longest prompt
N   tokens of the packed row              R   rows of a tile: prompts, or completions
M   completion tokens of all rows         C   tokens of the longest row of the tile
H   heads                                 n   tokens of the tile
D   size of a head                        q   tokens with which all prompts begin
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MIN_SHARED = 16
"""Number of tokens with which all prompts must begin to be in the row once. With fewer tokens,
which a chat template alone may write, there is little to save. Chosen, not measured."""


@dataclass(frozen=True)
class Tile:
    """Part of the packed row for one kernel call: all prompts, or completions of similar length."""

    width: int
    """Number of tokens of the longest row, C."""
    slots_n: Tensor | None
    """Index of each token in the padded tensor ``[R * C]``, both without the shared tokens. None if
    no row is padded."""
    prompt_R: Tensor
    """Index of each row's prompt. In the tile of the prompts, each row is a prompt itself."""
    num_shared: int = 0
    """Number of tokens with which each row begins, q. The tile has them once, as its first."""

    def pad(self, x_nHD: Tensor) -> Tensor:
        """Rearrange ``[n, H, D]`` to ``[R, H, C, D]``, with zeros at the padding."""
        R = len(self.prompt_R)
        shared_qHD = x_nHD[: self.num_shared]
        x_nHD = x_nHD[self.num_shared :]
        own_width = self.width - self.num_shared
        if self.slots_n is not None:
            zeros = x_nHD.new_zeros(R * own_width, *x_nHD.shape[1:])
            x_nHD = zeros.index_copy_(0, self.slots_n, x_nHD)
        x_RCHD = x_nHD.unflatten(0, (R, own_width))
        if self.num_shared:
            shared_RqHD = shared_qHD.expand(R, -1, -1, -1)
            x_RCHD = torch.cat([shared_RqHD, x_RCHD], dim=1)
        return x_RCHD.transpose(1, 2)

    def unpad(self, x_RHCD: Tensor) -> Tensor:
        """Rearrange ``[R, H, C, D]`` to ``[n, H, D]``, without the padding."""
        x_RCHD = x_RHCD.transpose(1, 2)
        x_nHD = x_RCHD[:, self.num_shared :].flatten(0, 1)
        if self.slots_n is not None:
            x_nHD = x_nHD.index_select(0, self.slots_n)
        if self.num_shared:
            # The shared tokens have the same attention in each row.
            shared_qHD = x_RCHD[0, : self.num_shared]
            x_nHD = torch.cat([shared_qHD, x_nHD])
        return x_nHD


@dataclass(frozen=True)
class PackedLayout:
    """The packed row: all prompts, then the completions, tile by tile.

    The last token of each completion is not in the row, because its logits would score no token.
    """

    ids_1N: Tensor
    positions_1N: Tensor
    predictor_M: Tensor
    """Index in the packed row of each completion token's predecessor, whose logits score it.

    Completion tokens are in the order of the batch."""
    tiles: list[Tile]
    """The tile of the prompts, then the tiles of completions."""
    sizes: list[int]
    """Number of tokens of each tile, then of the padding at the end of the packed row."""
    prompt_lengths_U: Tensor
    masks: dict[tuple, Tensor] = field(default_factory=dict)
    """Attention masks, built by the first layer and used by all layers."""

    def visible_RCS(self, tile: Tile) -> Tensor:
        """Return ``[R, C, P + C]``: True where a token of a completion may attend to a key.

        The first P keys are the padded prompt, the last C keys the padded completion. Token c of a
        completion attends to key s if ``s < length of the prompt`` or ``P <= s <= P + c``.
        """
        P = self.tiles[0].width
        index_S = torch.arange(P + tile.width, device=tile.prompt_R.device)
        prompt_lengths_R = self.prompt_lengths_U[tile.prompt_R]
        is_prompt_RS = index_S < prompt_lengths_R[:, None]
        is_completion_S = index_S >= P
        is_up_to_itself_CS = index_S <= index_S[P:, None]
        return is_prompt_RS[:, None] | (is_completion_S & is_up_to_itself_CS)


def pack(
    sequence_ids_BS: Tensor,
    prompt_lengths_B: Sequence[int],
    lengths_B: Sequence[int],
    groups_B: Sequence[int],
) -> PackedLayout:
    """Pack the rows of a micro-batch, on the device of the token ids.

    Args:
        sequence_ids_BS: ``[B, S]`` token ids: prompt, then completion, then padding.
        prompt_lengths_B: number of tokens of each prompt.
        lengths_B: number of tokens of each completion.
        groups_B: index of each row's group. Rows of one group have the same prompt.
    """
    device = sequence_ids_BS.device
    B, S = sequence_ids_BS.shape
    # Prompt u is the prompt of the u-th group, and is read from any row of the group.
    row_of_group = {group: b for b, group in enumerate(groups_B)}
    prompt_of_group = {group: u for u, group in enumerate(row_of_group)}
    prompt_lengths = [prompt_lengths_B[b] for b in row_of_group.values()]
    all_but_last = [length - 1 for length in lengths_B]

    prompt_rows = list(row_of_group.values())
    q = _num_shared(sequence_ids_BS[prompt_rows], min(prompt_lengths))

    # Tile by tile, collect where in the batch the tokens of the packed row come from.
    index_BS = torch.arange(B * S).view(B, S)
    U = len(prompt_lengths)
    own_lengths = [length - q for length in prompt_lengths]
    prompts_tile = _make_tile(
        own_lengths,
        range(U),
        device,
        num_shared=q,
    )
    tiles = [prompts_tile]
    sizes = [q + sum(own_lengths)]
    ends = [index_BS[b, q : prompt_lengths_B[b]] for b in prompt_rows]
    sources = [index_BS[prompt_rows[0], :q], *ends]

    start_B = [0] * B  # index of each completion in the packed row
    end = sizes[0]
    for rows in _split_into_tiles(all_but_last):
        lengths = [all_but_last[b] for b in rows]
        prompts = [prompt_of_group[groups_B[b]] for b in rows]
        tiles.append(_make_tile(lengths, prompts, device))
        sizes.append(sum(lengths))
        for b, length in zip(rows, lengths, strict=True):
            first = prompt_lengths_B[b]
            sources.append(index_BS[b, first : first + length])
            start_B[b] = end
            end += length

    # A token's logits score the next token. So the last token of the prompt scores the first token
    # of the completion, and each token of the completion but the last scores the next one.
    end_U = q + torch.tensor(own_lengths).cumsum(0)
    before = [end_U[:0]]  # a micro-batch may have no scored token, and cat() wants a tensor
    for b, group in enumerate(groups_B):
        if lengths_B[b]:
            end_of_prompt = end_U[prompt_of_group[group]]
            before.append(end_of_prompt[None] - 1)
            before.append(start_B[b] + torch.arange(all_but_last[b]))

    # The row ends with padding, which belongs to no tile: no other token attends to the padding.
    source_N = torch.cat(sources).to(device)
    N = len(source_N)
    num_padding = round_up_to_bucket(N) - N
    sizes.append(num_padding)
    id_N = sequence_ids_BS.flatten()[source_N]
    id_N = F.pad(id_N, (0, num_padding))
    position_N = F.pad(source_N % S, (0, num_padding))
    return PackedLayout(
        ids_1N=id_N[None],
        positions_1N=position_N[None],
        predictor_M=torch.cat(before).to(device),
        tiles=tiles,
        sizes=sizes,
        prompt_lengths_U=torch.tensor(prompt_lengths, device=device),
    )


def pack_prompts(
    prompts: Sequence[Sequence[int]],
    device: torch.device | str,
) -> PackedLayout:
    """Pack prompts for the prefill; ``predictor_M`` is the index of each prompt's last token."""
    U = len(prompts)
    lengths = [len(prompt) for prompt in prompts]
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids_BS = pad_sequence(rows, batch_first=True).to(device)
    # Each prompt is packed as if it had a completion of one token. That token would be the last of
    # the completion, so it is not in the packed row.
    return pack(
        ids_BS,
        prompt_lengths_B=lengths,
        lengths_B=[1] * U,
        groups_B=range(U),
    )


def round_up_to_bucket(size: int) -> int:
    """Return the size rounded up by less than 1/16, so that few different sizes occur.

    Between a power of two and the next there are 16 possible results. On the CPU, oneDNN keeps a
    kernel and the kernel's working memory for each shape.
    """
    num_bits = (size - 1).bit_length()
    # Sizes above 2**(num_bits - 1), up to 2**num_bits, are 17 to 32 steps.
    step = 2 ** max(num_bits - 5, 0)
    num_steps = -(-size // step)
    return num_steps * step


def _num_shared(ids_US: Tensor, shortest: int) -> int:
    """Return the number of tokens with which all rows begin, or 0 if these are too few.

    Each prompt keeps at least one token of its own, whose logits score the first token of a
    completion.
    """
    if len(ids_US) == 1:
        return 0
    is_equal_US = ids_US == ids_US[0]
    is_shared_S = is_equal_US.all(dim=0).cumprod(dim=0)
    num_shared = int(is_shared_S[: max(shortest - 1, 0)].sum())
    if num_shared < MIN_SHARED:
        return 0
    return num_shared


def _split_into_tiles(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows of each tile, the longest first. Rows without tokens are in no tile.

    The shortest row of a tile has at least 3/4 as many tokens as the longest row, or at most 16
    tokens fewer.
    """
    tiles: list[list[int]] = []
    shortest = 0
    longest_first = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    for b in longest_first:
        length = lengths[b]
        if length <= 0:
            break
        if not tiles or length < shortest:
            tiles.append([])
            # A lower limit would mean more padding, a higher limit more kernel calls. Up to 16
            # tokens of padding cost less than a call.
            shortest = min(0.75 * length, length - 16)
        tiles[-1].append(b)
    return tiles


def _make_tile(
    lengths: Sequence[int],
    prompts: Sequence[int],
    device: torch.device,
    num_shared: int = 0,
) -> Tile:
    """Return a tile whose row r has ``lengths[r]`` tokens and prompt number ``prompts[r]``.

    The ``num_shared`` tokens with which each row begins are not in ``lengths``.
    """
    C = max(lengths)
    slots_n = None
    if min(lengths) < C:
        slots = [torch.arange(length) + r * C for r, length in enumerate(lengths)]
        slots_n = torch.cat(slots).to(device)
    return Tile(
        width=num_shared + C,
        slots_n=slots_n,
        prompt_R=torch.tensor(prompts, device=device),
        num_shared=num_shared,
    )

"""A group as one packed sequence: its prompt once, then its completions, each of which sees the prompt and itself only.

G completions of a prompt of P tokens are P + sum(T_g) tokens instead of G rows of P + T_max. A micro-batch is a single row without any
padding; only attention knows where one completion ends and the next begins, every other layer works on single tokens. Attention is
one call for the prompts among themselves, and one per *tile* of completions of like length, over their prompts' keys and their own:
a dense mask over the whole row would spend most of its work on pairs that do not see each other.

Shapes: ``N`` tokens of the row, ``U`` prompts, ``P`` longest prompt, ``R`` completions of a tile, ``C`` longest of the tile,
``H`` query heads, ``K`` key heads, ``D`` head size, ``M`` scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.attention.forked import ForkedCache

ATTENTION = "sdpa_or_packed"
"""Name of the attention function that models are switched to: SDPA, unless a call brings a packed layout."""


class CannotPack(ValueError):
    """The model's attention is more than a softmax over all tokens before."""


@dataclass(frozen=True)
class Tile:
    """Prompts, or completions of like length: consecutive tokens of the row whose attention is one call."""

    rows: int
    width: int
    slots_n: torch.Tensor | None
    """Where each token lies among the ``rows * width`` padded places; None: there is no padding."""
    prompt_R: torch.Tensor | None = None
    """Which prompt each completion continues; None: these are the prompts."""
    visible_RCS: torch.Tensor | None = None
    """``[R, C, P + C]``, True where a completion's token sees a key: of its prompt, or its own up to there."""

    def pad(self, x_nHD: torch.Tensor) -> torch.Tensor:
        """``[n, H, D]`` to ``[R, C, H, D]``."""
        if self.slots_n is not None:
            x_nHD = _Spread.apply(x_nHD, self.slots_n, self.rows * self.width)
        return x_nHD.unflatten(0, (self.rows, self.width))

    def unpad(self, x_RCHD: torch.Tensor) -> torch.Tensor:
        """``[R, C, H, D]`` to ``[n, H, D]``."""
        flat = x_RCHD.flatten(0, 1)
        return flat if self.slots_n is None else _Collect.apply(flat, self.slots_n)


@dataclass(frozen=True)
class Packed:
    """Where everything lies in the row: first the prompts, then the completions tile by tile."""

    ids_1N: torch.Tensor
    positions_1N: torch.Tensor
    before_M: torch.Tensor
    """The place whose logits score each completion token, row by row of the batch. (The last token of a completion predicts
    nothing, and is not in the row.)"""
    tiles: tuple[Tile, ...]
    """The prompts' tile first."""
    sizes: tuple[int, ...]
    """Tokens of each tile."""
    masks: dict = field(default_factory=dict)
    """The tiles' masks in the form a kernel wants: made by the first layer, used by all."""


def pack(
    sequence_ids_BS: torch.Tensor, prompt_lengths_B: Sequence[int], lengths_B: Sequence[int], groups_B: Sequence[int]
) -> Packed:
    """Lay out the rows of a micro-batch.

    Args:
        sequence_ids_BS: ``[B, S]`` prompt, then completion, then padding.
        prompt_lengths_B: tokens of each prompt.
        lengths_B: tokens of each completion.
        groups_B: rows of the same number have the same prompt.

    Returns:
        The layout, on the device of ``sequence_ids_BS``.
    """
    device, S = sequence_ids_BS.device, sequence_ids_BS.shape[1]
    first_row: dict[int, int] = {}
    for b, group in enumerate(groups_B):
        first_row.setdefault(group, b)
    prompt_of_group = {group: u for u, group in enumerate(first_row)}
    P_U = [prompt_lengths_B[b] for b in first_row.values()]
    spans = [
        (b, 0, prompt_lengths_B[b]) for b in first_row.values()
    ]  # (row, from, to) of the tokens, in the row's order
    tiles, sizes = [_tile(P_U, device)], [sum(P_U)]
    for rows in _alike([max(n - 1, 0) for n in lengths_B]):
        lengths_R = [lengths_B[b] - 1 for b in rows]
        prompt_R = torch.tensor([prompt_of_group[groups_B[b]] for b in rows])
        tiles.append(_tile(lengths_R, device, prompt_R, torch.tensor(P_U)))
        sizes.append(sum(lengths_R))
        spans += [(b, prompt_lengths_B[b], prompt_lengths_B[b] + n) for b, n in zip(rows, lengths_R, strict=True)]

    place_of_row, place = {}, 0
    for number, (b, start, end) in enumerate(spans):
        if number >= len(P_U):
            place_of_row[b] = place
        place += end - start
    last_of_prompt_U = torch.tensor(P_U).cumsum(0).sub(1).tolist()
    before = []
    for b, group in enumerate(groups_B):
        if lengths_B[b]:
            before.append(torch.tensor([last_of_prompt_U[prompt_of_group[group]]]))
        if lengths_B[b] > 1:
            before.append(torch.arange(place_of_row[b], place_of_row[b] + lengths_B[b] - 1))
    source_N = torch.cat([torch.arange(b * S + start, b * S + end) for b, start, end in spans])
    positions_N = torch.cat([torch.arange(start, end) for _, start, end in spans])
    return Packed(
        ids_1N=sequence_ids_BS.flatten()[source_N.to(device)][None, :],
        positions_1N=positions_N.to(device)[None, :],
        before_M=torch.cat([torch.zeros(0, dtype=torch.long), *before]).to(device),
        tiles=tuple(tiles),
        sizes=tuple(sizes),
    )


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers in tiles of like length (at least three quarters of the longest, or 16 fewer); rows of length 0 in none."""
    tiles: list[list[int]] = []
    longest = 0
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        if lengths[b] == 0:
            break
        if not tiles or lengths[b] < min(0.75 * longest, longest - 16):
            tiles.append([])
            longest = lengths[b]
        tiles[-1].append(b)
    return tiles


def _tile(lengths_R: list[int], device, prompt_R: torch.Tensor | None = None, prompt_lengths_U=None) -> Tile:
    R, C = len(lengths_R), max(lengths_R)
    slots_n = None
    if min(lengths_R) < C:
        slots_n = torch.cat([torch.arange(r * C, r * C + n) for r, n in enumerate(lengths_R)]).to(device)
    if prompt_R is None:
        return Tile(R, C, slots_n)
    P = int(prompt_lengths_U.max())
    sees_prompt_RP = torch.arange(P, device=device) < prompt_lengths_U[prompt_R].to(device)[:, None]
    causal_CC = torch.ones(C, C, dtype=torch.bool, device=device).tril()
    visible_RCS = torch.cat([sees_prompt_RP[:, None, :].expand(R, C, P), causal_CC.expand(R, C, C)], dim=-1)
    return Tile(R, C, slots_n, prompt_R.to(device), visible_RCS)


class _Spread(torch.autograd.Function):
    """Rows to places of a larger tensor of zeros. The places are distinct, so that the gradient is a plain look-up."""

    @staticmethod
    def forward(ctx, x, places, size):
        ctx.save_for_backward(places)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """The inverse of :class:`_Spread`."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        ctx.size = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None


def packed_attention(
    q_1HND: torch.Tensor, k_1KND: torch.Tensor, v_1KND: torch.Tensor, packed: Packed, scaling: float | None
) -> torch.Tensor:
    """Attention over a packed row; ``[1, N, H, D]``."""
    q_s, k_s, v_s = ([*x[0].transpose(0, 1).split(packed.sizes)] for x in (q_1HND, k_1KND, v_1KND))
    H, K = q_1HND.shape[1], k_1KND.shape[1]
    prompts = packed.tiles[0]
    q_UPHD, k_UPKD, v_UPKD = (prompts.pad(x[0]) for x in (q_s, k_s, v_s))
    # Padding lies to the right, where a causal query never looks.
    out_UHPD = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q_UPHD, _repeat(k_UPKD, H // K), _repeat(v_UPKD, H // K))),
        is_causal=True,
        scale=scaling,
    )
    outs = [prompts.unpad(out_UHPD.transpose(1, 2))]
    for number, tile in enumerate(packed.tiles[1:], 1):
        q_RCHD, k_RCKD, v_RCKD = (tile.pad(x[number]) for x in (q_s, k_s, v_s))
        k_RKSD = torch.cat([k_UPKD[tile.prompt_R], k_RCKD], dim=1).transpose(1, 2)
        v_RKSD = torch.cat([v_UPKD[tile.prompt_R], v_RCKD], dim=1).transpose(1, 2)
        # The H/K query heads that share a key head become so many more queries of it: nothing is repeated.
        q_RKgCD = q_RCHD.transpose(1, 2).reshape(tile.rows, K, H // K * tile.width, -1)
        mask = _additive(packed, number, H // K, q_1HND.dtype)
        out_RKgCD = F.scaled_dot_product_attention(q_RKgCD, k_RKSD, v_RKSD, attn_mask=mask, scale=scaling)
        outs.append(tile.unpad(out_RKgCD.reshape(tile.rows, H, tile.width, -1).transpose(1, 2)))
    return torch.cat(outs)[None]


def _additive(packed: Packed, number: int, repeats: int, dtype: torch.dtype) -> torch.Tensor:
    """``[R, 1, repeats * C, S]``: 0 where visible, else -inf.

    In the dtype that autocast multiplies in, and on CUDA in rows of a multiple of 8 places, as its kernel wants them: else every layer
    would keep a copy of its own for the backward pass.
    """
    visible_RCS = packed.tiles[number].visible_RCS
    kind = visible_RCS.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    key = (number, repeats, dtype)
    if key not in packed.masks:
        R, C, S = visible_RCS.shape
        width = -(-S // 8) * 8 if kind == "cuda" else S
        bias_RrCS = torch.zeros(R, repeats, C, width, dtype=dtype, device=visible_RCS.device)
        bias_RrCS[..., :S].masked_fill_(~visible_RCS[:, None], float("-inf"))
        packed.masks[key] = bias_RrCS.view(R, 1, repeats * C, width)[..., :S]
    return packed.masks[key]


def _repeat(x_UPKD: torch.Tensor, times: int) -> torch.Tensor:
    return x_UPKD if times == 1 else x_UPKD.repeat_interleave(times, dim=2)


def _attention(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    packed: Packed | None = None,
    forked: ForkedCache | None = None,
    **options,
):
    """What transformers calls in every layer: over a packed row, over forked prompts and one token a row, or as SDPA does."""
    if packed is None and forked is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if any(options.get(name) is not None for name in ("sliding_window", "softcap", "s_aux", "position_bias")):
        raise CannotPack("its attention has a window, a cap, sinks or a bias")
    if packed is None:
        return forked.attend(module.layer_idx, query, key, value, options.get("scaling")), None
    if forked is not None:
        prompts, size = packed.tiles[0], packed.sizes[0]
        forked.store_prompts(module.layer_idx, *(prompts.pad(x[0].transpose(0, 1)[:size]) for x in (key, value)))
    return packed_attention(query, key, value, packed, options.get("scaling")), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def packed_hidden(model: nn.Module, packed: Packed, forked: ForkedCache | None = None) -> torch.Tensor:
    """Last hidden states ``[N, H]`` of the backbone ``model`` over a packed row; the prompts' keys and values to ``forked``."""
    return _without_mask(
        model, packed.ids_1N, position_ids=packed.positions_1N, packed=packed, forked=forked
    ).last_hidden_state[0]


def forked_hidden(
    model: nn.Module, ids_R: torch.Tensor, positions_R: torch.Tensor, forked: ForkedCache
) -> torch.Tensor:
    """Last hidden states ``[R, H]`` of one more token per row; its keys and values to ``forked``."""
    forked.length += 1
    return _without_mask(model, ids_R[:, None], position_ids=positions_R[:, None], forked=forked).last_hidden_state[
        :, 0
    ]


def pack_prompts(prompts: Sequence[Sequence[int]], device: torch.device | str) -> Packed:
    """Prompts alone, one after the other; ``before_M`` is each one's last token."""
    lengths = [len(prompt) for prompt in prompts]
    return Packed(
        ids_1N=torch.tensor([token for prompt in prompts for token in prompt], device=device)[None, :],
        positions_1N=torch.cat([torch.arange(n) for n in lengths]).to(device)[None, :],
        before_M=torch.tensor(lengths).cumsum(0).sub(1).to(device),
        tiles=(_tile(lengths, device),),
        sizes=(sum(lengths),),
    )


def _without_mask(model: nn.Module, ids: torch.Tensor, **options):
    # A ready-made four-dimensional mask keeps transformers from making one; our attention does not look at it.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    return model(input_ids=ids, attention_mask=no_mask, use_cache=False, **options)


@torch.no_grad()
def enable_packing(model: nn.Module, backbone: nn.Module | None) -> str | None:
    """Switch the model to :data:`ATTENTION` if packed and padded computation agree on a short batch.

    Args:
        model: a causal language model of transformers.
        backbone: the same without its head; None if it has no separate one.

    Returns:
        None, or why each prompt must be computed once per completion; the model is then as it was.
    """
    before = model.config._attn_implementation
    if before != "sdpa":
        return f"model.attn_implementation={before} is not sdpa"
    if backbone is None:
        return "its head does more than a product with the last hidden state"
    device, was_training = next(model.parameters()).device, model.training
    generator = torch.Generator().manual_seed(0)
    prompts, lengths, groups = [9, 9, 5, 5, 5], [4, 1, 3, 7, 2], [0, 0, 1, 1, 1]
    ids_BS = torch.randint(model.get_input_embeddings().weight.shape[0], (5, 13), generator=generator)
    ids_BS[1, :9], ids_BS[3:, :5] = ids_BS[0, :9], ids_BS[2, :5]
    ids_BS = ids_BS.to(device)
    model.eval()
    try:
        padded_BSH = backbone(input_ids=ids_BS, use_cache=False).last_hidden_state
        expected = torch.cat(
            [padded_BSH[b, p - 1 : p - 1 + n] for b, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        )
        model.set_attn_implementation(ATTENTION)
        packed = pack(ids_BS, prompts, lengths, groups)
        found = packed_hidden(backbone, packed)[packed.before_M]
        forked = ForkedCache([9, 5], room=1, device=device)
        packed_hidden(backbone, pack_prompts([ids_BS[0, :9].tolist(), ids_BS[2, :5].tolist()], device), forked)
        rows = [0, 2, 3, 4]  # those with a second token to predict
        forked.fork(torch.tensor([0, 1, 1, 1], device=device))
        starts = torch.tensor(prompts, device=device)[rows]
        found = torch.cat([found, forked_hidden(backbone, ids_BS[rows, starts], starts, forked)])
        expected = torch.cat([expected, padded_BSH[rows, starts]])
        if torch.allclose(found, expected, rtol=0, atol=5e-5 * float(expected.abs().max())):
            return None
        reason = "its layers mix the tokens of a row in other ways than attention"
    except Exception as error:  # others' code, called in a way it may not know
        reason = str(error).splitlines()[0] if isinstance(error, CannotPack) else f"{type(error).__name__} when packed"
    finally:
        model.train(was_training)
    model.set_attn_implementation(before)
    return reason

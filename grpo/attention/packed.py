"""Attention over a packed row (:mod:`grpo.attention.layout`), and the switch of a model to this
attention.

Only attention mixes the tokens of a row; every other layer of a transformers model works on single
tokens and needs no change. Attention is computed tile by tile::

    tile of the prompts    causal:  prompt u attends to itself
    tile of completions    S = P + C keys:  row r attends to its prompt, then causally to itself

With one dense mask for the whole row, most work would be on pairs of tokens that do not attend to
each other.

N   tokens of the packed row              H   query heads
U   prompts                               K   key heads, and as many value heads
P   tokens of the longest prompt          g   query heads of each key head, H / K
R   completions of a tile                 j   queries of a key head and a completion, g * C
C   tokens of the longest completion      D   size of a head
S   keys of a tile, P + C
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.attention.forked import ForkedCache, additive_mask, product_dtype, repeat_heads
from grpo.attention.layout import PackedLayout, Tile

ATTENTION = "sdpa_or_packed"
"""Name under which transformers finds our attention function. The function is SDPA, unless a
forward pass gets a :class:`PackedLayout` or a :class:`ForkedCache`."""
UNUSED_MASK = (1, 1, 1, 1)
"""Shape of a dummy mask, which our forward passes give to transformers. Nothing reads its values.

Without a mask transformers would build a large one. A mask of four dimensions stays as it is."""


def packed_attention(
    q_1HND: Tensor,
    k_1KND: Tensor,
    v_1KND: Tensor,
    packed: PackedLayout,
    scaling: float | None,
) -> Tensor:
    """Return the attention ``[1, N, H, D]`` of all tokens of a packed row.

    Token n gets ``out_n = sum_s w_s v_s`` with the weights ``w = softmax_s(scaling * (q_n . k_s))``
    over the tokens s that token n attends to (:mod:`grpo.attention.layout`).
    """
    H = q_1HND.shape[1]
    K = k_1KND.shape[1]
    g = H // K
    dtype = product_dtype(v_1KND)

    def pad_tiles(x_1HND: Tensor) -> list[Tensor]:
        """Return the padded tokens of each tile, ``[R, H, C, D]``."""
        x_HND = x_1HND[0].to(dtype)
        x_NHD = x_HND.transpose(0, 1)
        *parts, _ = x_NHD.split(packed.sizes)
        return [tile.pad(part) for tile, part in zip(packed.tiles, parts, strict=True)]

    with torch.autocast(v_1KND.device.type, enabled=False):
        q_UHPD, *q_tiles = pad_tiles(q_1HND)
        k_UKPD, *k_tiles = pad_tiles(k_1KND)
        v_UKPD, *v_tiles = pad_tiles(v_1KND)
        prompts, *completions = packed.tiles

        # Prompts are padded on the right. Causal attention does not look there, so no mask is
        # needed.
        out_UHPD = F.scaled_dot_product_attention(
            q_UHPD,
            repeat_heads(k_UKPD, H),
            repeat_heads(v_UKPD, H),
            is_causal=True,
            scale=scaling,
        )
        outs = [prompts.unpad(out_UHPD)]

        for tile, q_RHCD, k_RKCD, v_RKCD in zip(
            completions,
            q_tiles,
            k_tiles,
            v_tiles,
            strict=True,
        ):
            R = len(tile.prompt_R)
            C = tile.width
            # The keys of each completion's prompt come first, then the keys of the completion.
            k_RKSD = torch.cat([k_UKPD[tile.prompt_R], k_RKCD], dim=2)
            v_RKSD = torch.cat([v_UKPD[tile.prompt_R], v_RKCD], dim=2)
            # The g query heads of a key head become g times as many queries of that key head. So
            # keys and values are not repeated for each query head.
            q_RKjD = q_RHCD.reshape(R, K, g * C, -1)
            out_RKjD = F.scaled_dot_product_attention(
                q_RKjD,
                k_RKSD,
                v_RKSD,
                attn_mask=_tile_mask(packed, tile, g, dtype),
                scale=scaling,
            )
            out_RHCD = out_RKjD.reshape(R, H, C, -1)
            outs.append(tile.unpad(out_RHCD))

        # No token attends to the padding at the end of the row, but the layers after attention
        # expect N tokens.
        num_padding = packed.sizes[-1]
        padding = outs[0].new_zeros(num_padding, *outs[0].shape[1:])
        return torch.cat([*outs, padding])[None]


def _tile_mask(
    packed: PackedLayout,
    tile: Tile,
    g: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return a tile's additive mask ``[R, 1, j, S]``: 0 where a token may attend, else -inf."""
    key = (id(tile), g, dtype)
    if key not in packed.masks:
        mask_RCS = additive_mask(~packed.visible_RCS(tile), dtype)
        # All g query heads of a token see the same keys.
        mask_RjS = mask_RCS.repeat(1, g, 1)
        packed.masks[key] = mask_RjS[:, None]
    return packed.masks[key]


def _attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    packed: PackedLayout | None = None,
    forked: ForkedCache | None = None,
    **options,
):
    """The attention function that transformers calls in every layer.

    ``packed`` alone gives attention over a packed row. ``packed`` and ``forked`` together give
    attention over a packed row of prompts, whose keys and values are stored in the cache.
    With ``forked`` alone, the new tokens of each row of the cache attend to the row's earlier
    tokens and to themselves. With neither, attention is transformers' own SDPA.

    ValueError if the layer's attention is not a plain softmax over all earlier tokens. At the start
    of a run, :func:`grpo.rollout.check_model` catches this error and does not pack rows."""
    if packed is None and forked is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError("its attention has a window, a cap, sinks or a bias")
    if attention_mask is not None and attention_mask.shape != UNUSED_MASK:
        raise ValueError("its layers change the mask")

    layer = module.layer_idx
    scaling = options.get("scaling")
    if packed is None:
        return forked.attend(layer, query, key, value, scaling), None
    if forked is not None:
        # The packed row has prompts alone, so the first tile is the row without final padding.
        prompts = packed.tiles[0]
        size = packed.sizes[0]
        k_NKD = key[0].transpose(0, 1)
        v_NKD = value[0].transpose(0, 1)
        forked.store_prompts(layer, prompts.pad(k_NKD[:size]), prompts.pad(v_NKD[:size]))
    return packed_attention(query, key, value, packed, scaling), None


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def packed_hidden(
    backbone: nn.Module,
    packed: PackedLayout,
    forked: ForkedCache | None = None,
) -> Tensor:
    """Last hidden states ``[N, hidden size]`` of a packed row.

    With ``forked``, the row must hold prompts alone. Their keys and values are stored in the cache.
    """
    hidden_1NH = forked_hidden(
        backbone,
        packed.ids_1N,
        packed.positions_1N,
        forked,
        packed,
    )
    return hidden_1NH[0]


def forked_hidden(
    backbone: nn.Module,
    ids_RN: Tensor,
    positions_RN: Tensor,
    forked: ForkedCache | None,
    packed: PackedLayout | None = None,
) -> Tensor:
    """Last hidden states ``[R, N, hidden size]`` of N new tokens of each row of ``forked``.

    The caller must have called :meth:`ForkedCache.begin_token` or :meth:`ForkedCache.begin_tokens`
    for these tokens. With ``packed``, the tokens are a packed row instead (:func:`packed_hidden`).
    """
    unused_mask = torch.ones(UNUSED_MASK, dtype=torch.bool, device=ids_RN.device)
    output = backbone(
        input_ids=ids_RN,
        position_ids=positions_RN,
        attention_mask=unused_mask,
        use_cache=False,
        forked=forked,
        packed=packed,
    )
    return output.last_hidden_state


def window_of(config: PreTrainedConfig) -> tuple[str, int] | None:
    """Return name and size of the window in a model's configuration, or None without a window.

    A window restricts attention to the nearest tokens. Some models apply their window in the mask
    alone, so a test with fewer tokens than the window cannot notice the window.
    """
    for name, value in vars(config.get_text_config()).items():
        # Names as of Mistral, GPT-Neo and Llama 4. Some models have a switch beside the size, such
        # as `use_sliding_window`.
        is_window = name.endswith(("window", "window_size")) or name == "attention_chunk_size"
        if is_window and type(value) is int and getattr(config, f"use_{name}", True):
            return name, value
    return None


def packing_enabled(model: nn.Module) -> bool:
    """True if :func:`enable_packing` has switched this model to packed and forked attention."""
    return model.config._attn_implementation == ATTENTION


def enable_packing(model: nn.Module) -> str | None:
    """Switch a model to packed and forked attention, if its configuration allows this.

    Returns None if the model was switched, else the reason why not. A configuration does not show
    everything, so :func:`grpo.rollout.check_model` then compares the model's log-probs.
    """
    implementation = model.config._attn_implementation
    if implementation != "sdpa":
        return f"model.attn_implementation={implementation} is not sdpa"
    window = window_of(model.config)
    if window is not None:
        name, size = window
        return f"its attention has a window ({name}={size})"
    model.set_attn_implementation(ATTENTION)
    return None

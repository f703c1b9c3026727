"""Attention over a packed row (:mod:`grpo.attention.layout`), and the switch that makes a model use
it.

Only attention mixes the tokens of a row; every other layer of a transformers model works on single
tokens and needs no change. Attention over the packed row is one kernel call for the prompts, and
one per tile of completions, over the keys of their prompts and own tokens. With one dense mask for
the whole row, most work would be on pairs of tokens that do not see each other.

Shapes: ``N`` tokens of the packed row, ``U`` prompts, ``P`` longest prompt, ``R`` completions of a
tile, ``C`` longest of the tile, ``S = P + C`` keys of a tile, ``H`` query heads, ``K`` key heads,
``g = H/K``, ``j = g * C``, ``D`` head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.attention.forked import ForkedCache, product_dtype, repeat_heads
from grpo.attention.layout import PackedLayout

ATTENTION = "sdpa_or_packed"
"""Our attention function in transformers: SDPA, unless a pass brings a layout or a cache."""
ANY_MASK = (1, 1, 1, 1)
"""Shape of the mask of a packed pass, which is ignored: transformers then builds none."""


def packed_attention(
    q_1HND: Tensor,
    k_1KND: Tensor,
    v_1KND: Tensor,
    packed: PackedLayout,
    scaling: float | None,
) -> Tensor:
    """Attention over a packed row; ``[1, N, H, D]``."""
    H = q_1HND.shape[1]
    K = k_1KND.shape[1]
    g = H // K
    dtype = product_dtype(v_1KND)

    def padded(x_1HND: Tensor) -> list[Tensor]:
        """The tokens of each tile, ``[R, H, C, D]``."""
        x_NHD = x_1HND[0].to(dtype).transpose(0, 1)
        *parts, _ = x_NHD.split(packed.sizes)
        return [tile.pad(part) for tile, part in zip(packed.tiles, parts, strict=True)]

    with torch.autocast(v_1KND.device.type, enabled=False):
        q_s = padded(q_1HND)
        k_s = padded(k_1KND)
        v_s = padded(v_1KND)
        # The padding lies to the right of the tokens, where causal attention does not look.
        out_UHPD = F.scaled_dot_product_attention(
            q_s[0],
            repeat_heads(k_s[0], H),
            repeat_heads(v_s[0], H),
            is_causal=True,
            scale=scaling,
        )
        outs = [packed.tiles[0].unpad(out_UHPD)]

        for number, tile in enumerate(packed.tiles[1:], 1):
            R = len(tile.prompt_R)
            C = tile.width
            k_RKSD = torch.cat([k_s[0][tile.prompt_R], k_s[number]], dim=2)
            v_RKSD = torch.cat([v_s[0][tile.prompt_R], v_s[number]], dim=2)
            # The g query heads of a key head become g times as many queries of it, so that keys
            # and values are not repeated.
            out_RKjD = F.scaled_dot_product_attention(
                q_s[number].reshape(R, K, g * C, -1),
                k_RKSD,
                v_RKSD,
                attn_mask=_additive_mask(packed, number, g, dtype),
                scale=scaling,
            )
            outs.append(tile.unpad(out_RKjD.reshape(R, H, C, -1)))

        padding = outs[0].new_zeros(packed.sizes[-1], *outs[0].shape[1:])
        return torch.cat([*outs, padding])[None]


def _additive_mask(
    packed: PackedLayout,
    number: int,
    g: int,
    dtype: torch.dtype,
) -> Tensor:
    """``[R, 1, g * C, S]`` for a tile: 0 where a token may attend, else -inf."""
    key = (number, g, dtype)
    if key not in packed.masks:
        visible_RCS = packed.visible_RCS(packed.tiles[number])
        mask_RCS = torch.zeros_like(visible_RCS, dtype=dtype)
        mask_RCS.masked_fill_(~visible_RCS, -torch.inf)
        packed.masks[key] = mask_RCS.repeat(1, g, 1)[:, None]
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
    """The function that transformers calls in every attention layer.

    With ``packed``: attention over a packed row; with ``forked`` too: the same over prompts, whose
    keys and values go into the cache; with ``forked`` alone: more tokens per row; with neither:
    SDPA."""
    if packed is None and forked is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError("its attention has a window, a cap, sinks or a bias")
    if attention_mask is not None and attention_mask.shape != ANY_MASK:
        raise ValueError("its layers change the mask")

    scaling = options.get("scaling")
    if packed is None:
        return forked.attend(module.layer_idx, query, key, value, scaling), None
    if forked is not None:
        prompts = packed.tiles[0]
        size = packed.sizes[0]
        forked.store_prompts(
            module.layer_idx,
            prompts.pad(key[0].transpose(0, 1)[:size]),
            prompts.pad(value[0].transpose(0, 1)[:size]),
        )
    return packed_attention(query, key, value, packed, scaling), None


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def packed_hidden(
    backbone: nn.Module,
    packed: PackedLayout,
    forked: ForkedCache | None = None,
) -> Tensor:
    """Last hidden states ``[N, hidden]`` of a packed row; the prompts' keys and values go into
    ``forked``."""
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
    """Last hidden states ``[R, N, hidden]`` of more tokens per row, which ``forked`` has begun."""
    output = backbone(
        input_ids=ids_RN,
        position_ids=positions_RN,
        attention_mask=torch.ones(ANY_MASK, dtype=torch.bool, device=ids_RN.device),
        use_cache=False,
        forked=forked,
        packed=packed,
    )
    return output.last_hidden_state


def window_of(config: PreTrainedConfig) -> tuple[str, int] | None:
    """The entry of a configuration that restricts attention to the nearest tokens, with its value.

    None if there is none. Some models have their window in the mask alone, where a probe shorter
    than the window cannot see it.
    """
    for name, value in vars(config.get_text_config()).items():
        is_window = name.endswith(("window", "window_size")) or name == "attention_chunk_size"
        if is_window and type(value) is int and getattr(config, f"use_{name}", True):
            return name, value
    return None


def packing_enabled(model: nn.Module) -> bool:
    """True if :func:`enable_packing` has switched this model to packed and forked attention."""
    return model.config._attn_implementation == ATTENTION


def enable_packing(model: nn.Module) -> str | None:
    """Switch a model to packed and forked attention, or return why its configuration does not allow
    it.

    :func:`grpo.rollout.check_model` compares what the model then computes.
    """
    before = model.config._attn_implementation
    if before != "sdpa":
        return f"model.attn_implementation={before} is not sdpa"
    window = window_of(model.config)
    if window is not None:
        name, size = window
        return f"its attention has a window ({name}={size})"
    model.set_attn_implementation(ATTENTION)
    return None

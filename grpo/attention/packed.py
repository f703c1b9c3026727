"""Attention over a packed row (:mod:`grpo.attention.layout`), and the switch that makes a transformers model use it.

Only attention mixes the tokens of a row; every other layer works on single tokens and needs no change. Attention over
the packed row is one kernel call for the prompts, and one per tile of completions, over the keys of their prompts and
own tokens. With one dense mask for the whole row, most work would be on pairs of tokens that do not see each other.

Shapes: ``N`` tokens of the packed row, ``U`` prompts, ``P`` longest prompt, ``R`` completions of a tile, ``C`` longest
of the tile, ``S = P + C`` keys of a tile, ``H`` query heads, ``K`` key heads, ``g = H/K``, ``D`` head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.attention.forked import ForkedCache, product_dtype
from grpo.attention.layout import PackedLayout, pack, pack_prompts
from grpo.attention.precision import ieee_fp32

ATTENTION = "sdpa_or_packed"
"""Name of our attention function in transformers: SDPA, unless a pass brings a packed layout or a forked cache."""
ANY_MASK = (1, 1, 1, 1)
"""Shape of the mask of a packed pass, which is ignored: with a four-dimensional mask transformers builds none."""


class CannotPack(ValueError):
    """The model's attention is more than a softmax over all earlier tokens."""


def packed_attention(
    q_1HND: Tensor, k_1KND: Tensor, v_1KND: Tensor, packed: PackedLayout, scaling: float | None
) -> Tensor:
    """Attention over a packed row; ``[1, N, H, D]``."""
    H, K, dtype = q_1HND.shape[1], k_1KND.shape[1], product_dtype(v_1KND)
    g, prompts = H // K, packed.tiles[0]
    with torch.autocast(v_1KND.device.type, enabled=False):
        q_s, k_s, v_s = (x[0].to(dtype).transpose(0, 1).split(packed.sizes) for x in (q_1HND, k_1KND, v_1KND))
        q_UPHD, k_UPKD, v_UPKD = (prompts.pad(x[0]) for x in (q_s, k_s, v_s))
        repeated = (x if g == 1 else x.repeat_interleave(g, dim=2) for x in (k_UPKD, v_UPKD))
        heads_first = (x.transpose(1, 2) for x in (q_UPHD, *repeated))
        # The padding lies to the right of the tokens, where causal attention does not look.
        out_UHPD = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scaling)
        outs = [prompts.unpad(out_UHPD.transpose(1, 2))]
        for number, tile in enumerate(packed.tiles[1:], 1):
            q_RCHD, k_RCKD, v_RCKD = (tile.pad(x[number]) for x in (q_s, k_s, v_s))
            k_RKSD = torch.cat([k_UPKD[tile.prompt_R], k_RCKD], dim=1).transpose(1, 2)
            v_RKSD = torch.cat([v_UPKD[tile.prompt_R], v_RCKD], dim=1).transpose(1, 2)
            # The g query heads of a key head become g times as many queries of it: keys and values are not repeated.
            q_RKgCD = q_RCHD.transpose(1, 2).reshape(tile.rows, K, g * tile.width, -1)
            mask = _additive_mask(packed, number, g, dtype)
            out_RKgCD = F.scaled_dot_product_attention(q_RKgCD, k_RKSD, v_RKSD, attn_mask=mask, scale=scaling)
            outs.append(tile.unpad(out_RKgCD.reshape(tile.rows, H, tile.width, -1).transpose(1, 2)))
        outs.append(outs[0].new_zeros(packed.sizes[-1], *outs[0].shape[1:]))
        return torch.cat(outs)[None]


def _additive_mask(packed: PackedLayout, number: int, g: int, dtype: torch.dtype) -> Tensor:
    """``[R, 1, g * C, S]`` for a tile: 0 where a token may attend, else -inf.

    On CUDA its rows have a multiple of 8 elements, as the kernel requires: else every layer would copy it.
    """
    key = (number, g, dtype)
    if key not in packed.masks:
        visible_RCS = packed.tiles[number].visible_RCS(packed.tiles[0].width)
        kind, (R, C, S) = visible_RCS.device.type, visible_RCS.shape
        width = -(-S // 8) * 8 if kind == "cuda" else S
        bias_RgCS = torch.zeros(R, g, C, width, dtype=dtype, device=visible_RCS.device)
        bias_RgCS[..., :S].masked_fill_(~visible_RCS[:, None], float("-inf"))
        packed.masks[key] = bias_RgCS.view(R, 1, g * C, width)[..., :S]
    return packed.masks[key]


def _attention_forward(module, query, key, value, attention_mask, *, packed=None, forked=None, **options):
    """The function that transformers calls in every attention layer.

    With ``packed``: attention over a packed row; with ``forked`` too: the same over prompts, whose keys and values go
    into the cache; with ``forked`` alone: more tokens per row; with neither: SDPA.
    """
    if packed is None and forked is None:
        return _sdpa(module, query, key, value, attention_mask, **options)
    if any(options.get(name) is not None for name in ("sliding_window", "softcap", "s_aux", "position_bias")):
        raise CannotPack("its attention has a window, a cap, sinks or a bias")
    if attention_mask is not None and attention_mask.shape != ANY_MASK:
        raise CannotPack("its layers change the mask")
    if packed is None:
        return forked.attend(module.layer_idx, query, key, value, options.get("scaling")), None
    if forked is not None:
        prompts, size = packed.tiles[0], packed.sizes[0]
        forked.store_prompts(module.layer_idx, *(prompts.pad(x[0].transpose(0, 1)[:size]) for x in (key, value)))
    return packed_attention(query, key, value, packed, options.get("scaling")), None


def _sdpa(module, query, key, value, attention_mask, **options):
    """transformers' SDPA function, with keys and values repeated for each query head where CUDA needs it.

    Without a mask in fp32, transformers leaves that to PyTorch, whose math kernel then writes all scores to memory.
    """
    kind, H, K = key.device.type, query.shape[1], key.shape[1]
    is_fp32 = query.dtype == torch.float32 and not torch.is_autocast_enabled(kind)
    is_left_to_pytorch = attention_mask is None and key.shape[-1] == value.shape[-1] <= 256
    if kind == "cuda" and H != K and is_fp32 and is_left_to_pytorch:
        key, value = (x.repeat_interleave(H // K, dim=1) for x in (key, value))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register("sdpa", _sdpa)
AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def packed_hidden(backbone: nn.Module, packed: PackedLayout, forked: ForkedCache | None = None) -> Tensor:
    """Last hidden states ``[N, hidden]`` of a packed row, whose prompts' keys and values go into ``forked``, if any."""
    return _forward(backbone, packed.ids_1N, packed.positions_1N, packed=packed, forked=forked)[0]


def extended_hidden(backbone: nn.Module, ids_RN: Tensor, positions_RN, new_R: Tensor, forked: ForkedCache) -> Tensor:
    """Last hidden states ``[R, N, hidden]`` of several more tokens per row, padded on the left to N tokens.

    ``new_R``: the number of tokens of each row, whose keys and values go into ``forked``.
    """
    forked.begin_tokens(new_R)
    return _forward(backbone, ids_RN, positions_RN, forked=forked)


def forked_hidden(backbone: nn.Module, ids_R: Tensor, positions_R, forked: ForkedCache) -> Tensor:
    """Last hidden states ``[R, hidden]`` of one more token per row; its keys and values go into ``forked``."""
    forked.begin_token()
    return _forward(backbone, ids_R[:, None], positions_R[:, None], forked=forked)[:, 0]


def _forward(backbone: nn.Module, ids: Tensor, positions: Tensor, **caches) -> Tensor:
    options = dict(attention_mask=torch.ones(ANY_MASK, dtype=torch.bool, device=ids.device), use_cache=False)
    return backbone(input_ids=ids, position_ids=positions, **options, **caches).last_hidden_state


def window_of(config: PreTrainedConfig) -> tuple[str, int] | None:
    """The entry of a configuration that restricts attention to the nearest tokens, and its value; or None.

    Some models have their window in the mask alone, where a probe shorter than the window cannot see it.
    """
    for name, value in vars(config).items():
        is_window = name.endswith(("window", "window_size")) or name == "attention_chunk_size"
        if is_window and type(value) is int and getattr(config, f"use_{name}", True):
            return name, value
    return None


def packing_enabled(model: nn.Module) -> bool:
    """True if :func:`enable_packing` has switched this model to packed and forked attention."""
    return model.config._attn_implementation == ATTENTION


@torch.no_grad()
@ieee_fp32()
def enable_packing(model: nn.Module, backbone: nn.Module | None) -> str | None:
    """Switch the model to packed and forked attention, if both give the hidden states of padded attention in a probe.

    ``backbone`` is the model without its head, or None if the head cannot be applied separately. Returns None, or the
    reason why packing is impossible; the model is then unchanged.
    """
    before = model.config._attn_implementation
    if before != "sdpa":
        return f"model.attn_implementation={before} is not sdpa"
    if backbone is None:
        return "its head does more than a product with the last hidden state"
    if window := window_of(model.config.get_text_config()):
        return f"its attention has a window ({window[0]}={window[1]})"
    device, was_training = next(model.parameters()).device, model.training
    prompts, lengths, groups = [9, 9, 5, 5, 5], [4, 1, 3, 7, 2], [0, 0, 1, 1, 1]
    vocabulary, generator = model.get_input_embeddings().weight.shape[0], torch.Generator().manual_seed(0)
    ids_BS = torch.randint(vocabulary, (5, 13), generator=generator).to(device)
    ids_BS[1, :9], ids_BS[3:, :5] = ids_BS[0, :9], ids_BS[2, :5]
    model.eval()
    try:
        padded_BSH = backbone(input_ids=ids_BS, use_cache=False).last_hidden_state
        expected = [padded_BSH[b, p - 1 : p - 1 + n] for b, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        model.set_attn_implementation(ATTENTION)
        packed = pack(ids_BS, prompts, lengths, groups)
        found = packed_hidden(backbone, packed)[packed.before_M]
        forked = ForkedCache([9, 5], capacity=1, device=device)
        packed_hidden(backbone, pack_prompts([ids_BS[0, :9].tolist(), ids_BS[2, :5].tolist()], device), forked)
        rows = [0, 2, 3, 4]  # rows whose completion has a second token to predict
        forked.fork(torch.tensor([0, 1, 1, 1], device=device))
        starts = torch.tensor(prompts, device=device)[rows]
        found = torch.cat([found, forked_hidden(backbone, ids_BS[rows, starts], starts, forked)])
        expected = torch.cat([*expected, padded_BSH[rows, starts]])
        if torch.allclose(found, expected, rtol=0, atol=5e-5 * float(expected.abs().max())):
            return None
        reason = "its layers mix the tokens of a row in other ways than attention"
    except Exception as error:  # the model's code is not ours, and may not accept these arguments
        reason = str(error) if isinstance(error, CannotPack) else f"{type(error).__name__} when packed"
    finally:
        model.train(was_training)
    model.set_attn_implementation(before)
    return reason

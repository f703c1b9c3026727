"""One decode step written out for models with Llama's layers (Llama, Qwen2, Qwen3, Mistral, SmolLM).

It computes what the model's modules compute, with fewer operations, without module calls, without autocast's
check at every operation, and from copied weights (:mod:`grpo.rollout.weights`). Models for which :func:`matches_model`
is False decode through their own modules.

Shapes: ``R`` rows, ``H`` query heads, ``K`` key heads, ``D`` head size; hidden states are ``[R, hidden size]``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo.attention import ForkedCache, fast_paths, forked_hidden, pack_prompts, packed_hidden, packing_enabled
from grpo.attention.precision import ieee_fp32
from grpo.model.policy import context_limit
from grpo.rollout.weights import CopiedLinear

HEAD_NORMS = {"layers.self_attn.q_norm", "layers.self_attn.k_norm"}
LLAMA_MODULES = HEAD_NORMS | {"", "embed_tokens", "layers", "norm", "rotary_emb", "layers.self_attn", "layers.mlp"}
LLAMA_MODULES |= {"layers.input_layernorm", "layers.post_attention_layernorm"}
LLAMA_MODULES |= {f"layers.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
LLAMA_MODULES |= {f"layers.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")}
"""Names of the modules of a Llama, of which some models have no norms of heads."""


class LlamaDecoder:
    """Last hidden states of one more token per row: the same function as :func:`grpo.attention.forked_hidden`.

    For a backbone with :func:`has_llama_layers`; from copied weights, if made inside of
    :func:`grpo.rollout.weights.copied_weights`.
    """

    def __init__(self, backbone: nn.Module):
        self.backbone, self.layers = backbone, [_Layer(layer) for layer in backbone.layers]

    def __call__(self, token_R: Tensor, positions_R: Tensor, cache: ForkedCache) -> Tensor:
        """``[R, hidden size]``; the tokens' keys and values go into ``cache``."""
        cache.begin_token()
        with torch.autocast(token_R.device.type, enabled=False):
            x = self.backbone.embed_tokens(token_R)
            cos_R1D, sin_R1D = self.backbone.rotary_emb(x, position_ids=positions_R[:, None])
            # rotate_half(q) * sin == roll(q) * sin with sin's first half negated: one negation for all layers.
            half = sin_R1D.shape[-1] // 2
            sin_R1D = torch.cat([-sin_R1D[..., :half], sin_R1D[..., half:]], dim=-1)
            change = None  # what the last MLP adds to x: added together with the next norm
            for number, layer in enumerate(self.layers):
                x, change = layer(x, change, cos_R1D, sin_R1D, number, cache)
            return _add_and_norm(x, change, self.backbone.norm)[1]


class _Layer:
    def __init__(self, layer: nn.Module):
        attention, mlp = layer.self_attn, layer.mlp
        self.head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.qkv = _product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = _product([attention.o_proj])
        self.gate_up = _product([mlp.gate_proj, mlp.up_proj])
        self.down = _product([mlp.down_proj])
        # A copied product casts its input to its dtype.
        norms = (layer.input_layernorm, self.qkv), (layer.post_attention_layernorm, self.gate_up)
        self.norms = [(norm, getattr(product, "dtype", None)) for norm, product in norms]
        self.activation, self.scaling, self.D = mlp.act_fn, attention.scaling, attention.head_dim
        self.H, self.K = (proj.out_features // self.D for proj in (attention.q_proj, attention.k_proj))

    def __call__(self, x, change, cos_R1D, sin_R1D, number: int, cache: ForkedCache):
        """``x`` behind the attention, and what the MLP adds to it."""
        H, K, D = self.H, self.K, self.D
        x, normed = (x, _norm(x, *self.norms[0])) if change is None else _add_and_norm(x, change, *self.norms[0])
        heads = self.qkv(normed).view(len(x), H + 2 * K, D)
        q_and_k = _rotated(heads[:, : H + K], H, *self.head_norms, cos_R1D, sin_R1D, cache.dtype)
        q, k, v = q_and_k[:, :H, None], q_and_k[:, H:, None], heads[:, H + K :, None]
        attended = self.o(cache.attend(number, q, k, v, self.scaling).view(len(x), H * D))
        x, normed = _add_and_norm(x, attended, *self.norms[1])
        return x, self.down(_gated(self.gate_up(normed), self.activation))


def _norm(x: Tensor, norm: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """The RMS norm of ``x`` in ``dtype``; None: as the norm computes it."""
    normed = torch.rms_norm(x.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.variance_epsilon)
    return normed if dtype is None else normed.to(dtype)


@fast_paths.compiled(fast_paths.STEP)
def _add_and_norm(x: Tensor, change: Tensor, norm: nn.Module, dtype=None) -> tuple[Tensor, Tensor]:
    """``x + change`` and its RMS norm."""
    x = x + change
    return x, _norm(x, norm, dtype)


@fast_paths.compiled(fast_paths.STEP)
def _rotated(q_and_k, H: int, q_norm, k_norm, cos_R1D, sin_R1D, dtype: torch.dtype) -> Tensor:
    """Queries and keys ``[R, H + K, D]``, with the norms of heads that some models have, turned by their position."""
    if q_norm is not None:
        q, k = q_and_k.split((H, q_and_k.shape[1] - H), dim=1)
        q_and_k = torch.cat([_norm(x, norm) for x, norm in ((q, q_norm), (k, k_norm))], dim=1)
    turned = q_and_k.roll(q_and_k.shape[-1] // 2, dims=-1)
    return torch.addcmul(q_and_k * cos_R1D, turned, sin_R1D).to(dtype)


@fast_paths.compiled(fast_paths.STEP)
def _gated(gate_and_up: Tensor, activation: Callable) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return activation(gate) * up


def _product(layers: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    """The outputs of these layers for one input, side by side: as one product, if they have a fused copy."""
    if isinstance(layers[0], CopiedLinear) and len(layers[0].fused.layers) == len(layers):
        return layers[0].fused
    return layers[0] if len(layers) == 1 else lambda x: torch.cat([layer(x) for layer in layers], dim=-1)


def has_llama_layers(backbone: nn.Module) -> bool:
    """True if the model has modules of Llama's names alone, and RMS norms; see :func:`matches_model`."""
    names = {re.sub(r"^layers\.\d+", "layers", name) for name, _ in backbone.named_modules()}
    names = {".".join(name.split(".")[:3]) for name in names}  # without what adapters add inside of a projection
    return LLAMA_MODULES - HEAD_NORMS <= names <= LLAMA_MODULES and hasattr(backbone.norm, "variance_epsilon")


def _inside(block: Callable, layer: _Layer, *inputs):
    with block():
        return layer(*inputs)


@torch.no_grad()
@ieee_fp32()
def matches_model(
    model: PreTrainedModel, gathered: Callable[[nn.Module], contextlib.AbstractContextManager] = contextlib.nullcontext
) -> bool:
    """True if :class:`LlamaDecoder` gives the hidden states of the model's modules, in fp32.

    Tested with two tokens after two prompts. The rows of the second continue at positions up to the model's context,
    because some models scale queries by position. ``gathered``: a block in which a layer of a sharded model has its
    weights, which :class:`LlamaDecoder` reads without calling the layer.
    """
    backbone = model.base_model
    if not packing_enabled(model) or not has_llama_layers(backbone):
        return False
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    ids = torch.randint(backbone.embed_tokens.num_embeddings, (18,), generator=generator).tolist()
    limit = context_limit(model.config) or 2**20
    far = [2**power for power in range(3, 20) if 2**power < limit - 2]
    rows, positions_R = torch.tensor([0, 1] + [1] * len(far), device=device), torch.tensor([9, 5, *far], device=device)

    def hidden_after_two(decode: Callable) -> Tensor:
        cache = ForkedCache([9, 5], capacity=2, device=device)
        packed_hidden(backbone, pack_prompts((ids[:9], ids[9:14]), device), cache)
        cache.fork(rows)
        for number, token in enumerate((ids[13:], ids[15:])):
            token_R = torch.tensor([token[row % 3] for row in range(len(rows))], device=device)
            hidden = decode(token_R, positions_R + number, cache)
        return hidden

    with torch.autocast(device.type, enabled=False):
        theirs = hidden_after_two(partial(forked_hidden, backbone))
        try:
            decoder = LlamaDecoder(backbone)
            pairs = zip(backbone.layers, decoder.layers, strict=True)
            decoder.layers = [partial(_inside, partial(gathered, module), layer) for module, layer in pairs]
            ours = hidden_after_two(decoder)
        except Exception:  # modules with Llama's names, but with another interface
            return False
    return torch.allclose(theirs, ours, rtol=0, atol=5e-5 * float(theirs.abs().max()))

"""One decode step written out for Llama's layers (Llama, Mistral, Ministral 3, Qwen2, Qwen3).

It computes what the model's modules compute, with fewer operations, without module calls, without
autocast's check at every operation, and from copied weights (:mod:`grpo.rollout.weights`). Models
for which :func:`grpo.rollout.check_model` finds another result decode through their own modules.

Shapes: ``R`` rows, ``H`` query heads, ``K`` key heads, ``D`` head size; hidden states are
``[R, hidden size]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from grpo.attention import ForkedCache
from grpo.distributed import gathered
from grpo.rollout.weights import CopiedLinear

LLAMA_SHAPED = {"LlamaModel", "MistralModel", "Ministral3Model", "Qwen2Model", "Qwen3Model"}
"""Classes of transformers with these layers, some with norms of query and key heads."""


class LlamaDecoder:
    """Last hidden states of one more token per row, as :func:`grpo.attention.forked_hidden`.

    For a backbone of :data:`LLAMA_SHAPED`; from copied weights, if made inside of
    :func:`grpo.rollout.weights.copied_weights`.
    """

    def __init__(self, backbone: nn.Module):
        self.backbone = backbone
        self.layers = [_Layer(layer) for layer in backbone.layers]

    def __call__(self, token_R: Tensor, cache: ForkedCache) -> Tensor:
        """``[R, hidden size]``; the tokens' keys and values go into ``cache``."""
        backbone = self.backbone
        positions_R = cache.begin_token()
        with torch.autocast(token_R.device.type, enabled=False):
            x = backbone.embed_tokens(token_R)
            cos_R1D, sin_R1D = backbone.rotary_emb(x, position_ids=positions_R[:, None])
            # rotate_half(q) * sin == roll(q) * sin with the first half of sin negated:
            # one negation for all layers.
            first_half, second_half = sin_R1D.chunk(2, dim=-1)
            sin_R1D = torch.cat([-first_half, second_half], dim=-1)
            for number, layer in enumerate(self.layers):
                with gathered(layer.module):
                    x = layer(x, cos_R1D, sin_R1D, number, cache)
            return _norm(x, backbone.norm)


class _Layer:
    def __init__(self, module: nn.Module):
        attention = module.self_attn
        mlp = module.mlp
        self.module = module
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.qkv = _product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = _product(attention.o_proj)
        self.gate_up = _product(mlp.gate_proj, mlp.up_proj)
        self.down = _product(mlp.down_proj)
        self.norm = module.input_layernorm
        self.mlp_norm = module.post_attention_layernorm
        self.activation = mlp.act_fn
        self.scaling = attention.scaling
        self.D = attention.head_dim
        self.H = attention.q_proj.out_features // self.D
        self.K = attention.k_proj.out_features // self.D

    def __call__(
        self,
        x: Tensor,
        cos_R1D: Tensor,
        sin_R1D: Tensor,
        number: int,
        cache: ForkedCache,
    ) -> Tensor:
        """Hidden states behind the layer."""
        R = len(x)
        H = self.H
        K = self.K
        heads = self.qkv(_norm(x, self.norm)).view(R, H + 2 * K, self.D)
        q_and_k = heads[:, : H + K]
        if self.q_norm is not None:
            q = _norm(q_and_k[:, :H], self.q_norm)
            k = _norm(q_and_k[:, H:], self.k_norm)
            q_and_k = torch.cat([q, k], dim=1)
        half_turned = q_and_k.roll(self.D // 2, dims=-1)
        turned = torch.addcmul(q_and_k * cos_R1D, half_turned, sin_R1D)
        attended = cache.attend(
            number,
            turned[:, :H, None],
            turned[:, H:, None],
            heads[:, H + K :, None],
            self.scaling,
        )
        x = x + self.o(attended.view(R, H * self.D))

        gate_and_up = self.gate_up(_norm(x, self.mlp_norm))
        gate, up = gate_and_up.chunk(2, dim=-1)
        return x + self.down(self.activation(gate) * up)


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    """The RMS norm of ``x``."""
    weight = norm.weight
    return torch.rms_norm(
        x.to(weight.dtype),
        weight.shape,
        weight,
        norm.variance_epsilon,
    )


def _product(*layers: nn.Module) -> Callable[[Tensor], Tensor]:
    """The outputs of these layers for one input, side by side.

    It is one product, if the layers have a fused copy.
    """
    first = layers[0]
    if isinstance(first, CopiedLinear) and len(first.fused.layers) == len(layers):
        return first.fused
    return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)

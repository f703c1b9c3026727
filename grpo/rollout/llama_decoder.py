"""One decode step written out for Llama's layers (Llama, Mistral, Ministral 3, Qwen2, Qwen3).

The step computes what the model's modules compute, with fewer operations, without module calls,
without autocast's check at every operation, and from copies of the weights
(:mod:`grpo.rollout.weights`). :func:`grpo.rollout.check_model` compares both results for each
model, and leaves decoding to the modules if the results differ. A layer is (Touvron et al. 2023,
arXiv:2302.13971)::

    q, k, v = W_qkv norm(x)                            in Qwen3 with norms of each head of q and k
    q, k    = rotate(q), rotate(k)                     as of Su et al. 2021, arXiv:2104.09864
    x       = x + W_o attention(q, k, v)
    x       = x + W_down (act(W_gate norm(x)) * W_up norm(x))

    rotate(y) = y * cos + turn(y) * sin                turn([y1, y2]) = [-y2, y1], halves of a head

R   rows                                  D   size of a head
H   query heads                           E   size of a hidden state
K   key heads, as many as value heads
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from grpo.attention import ForkedCache
from grpo.distributed import unsharded
from grpo.rollout.weights import CopiedLinear

LLAMA_SHAPED = {"LlamaModel", "MistralModel", "Ministral3Model", "Qwen2Model", "Qwen3Model"}
"""Names of the classes in transformers that have Llama's layers. Some classes also normalise query
and key heads."""


class LlamaDecoder:
    """Computes one more token per row, like :func:`grpo.attention.forked_hidden`.

    The backbone must be of a class in :data:`LLAMA_SHAPED`. A decoder that is made inside of
    :func:`grpo.rollout.weights.copied_weights` computes from the copies of the weights.
    """

    def __init__(self, backbone: nn.Module):
        self.backbone = backbone
        self.layers = [_Layer(layer) for layer in backbone.layers]

    def __call__(self, token_R: Tensor, cache: ForkedCache) -> Tensor:
        """Last hidden states ``[R, E]``; the tokens' keys and values go into ``cache``."""
        backbone = self.backbone
        positions_R = cache.begin_token()
        # The copies have the dtypes of the products already.
        with torch.autocast(token_R.device.type, enabled=False):
            x_RE = backbone.embed_tokens(token_R)
            cos_R1D, sin_R1D = backbone.rotary_emb(
                x_RE,
                position_ids=positions_R[:, None],
            )
            # turn([y1, y2]) * sin = [y2, y1] * signed_sin. So the first half of the sine is negated
            # once for all layers, instead of half of the queries and keys in each layer.
            first_half, second_half = sin_R1D.chunk(2, dim=-1)
            signed_sin_R1D = torch.cat([-first_half, second_half], dim=-1)
            for number, layer in enumerate(self.layers):
                # In the check of a sharded model there are no copies, and each layer is gathered
                # when it computes.
                with unsharded(layer.module):
                    x_RE = layer(
                        x_RE,
                        cos_R1D,
                        signed_sin_R1D,
                        number,
                        cache,
                    )
            return _norm(x_RE, backbone.norm)


class _Layer:
    """A layer's weights as a decode step reads them, and the layer's computation."""

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
        x_RE: Tensor,
        cos_R1D: Tensor,
        signed_sin_R1D: Tensor,
        number: int,
        cache: ForkedCache,
    ) -> Tensor:
        """Return the hidden states ``[R, E]`` after this layer, which is layer ``number`` of
        ``cache``."""
        H = self.H
        K = self.K
        D = self.D

        # Heads side by side: H of queries, K of keys, K of values.
        qkv = self.qkv(_norm(x_RE, self.norm))
        qkv = qkv.view(-1, H + 2 * K, D)
        v_RKD = qkv[:, H + K :]
        qk = qkv[:, : H + K]
        if self.q_norm is not None:
            q_RHD = _norm(qk[:, :H], self.q_norm)
            k_RKD = _norm(qk[:, H:], self.k_norm)
            qk = torch.cat([q_RHD, k_RKD], dim=1)

        # Queries and keys are rotated by the same positions, so in one product.
        swapped_halves = qk.roll(D // 2, dims=-1)
        rotated = torch.addcmul(qk * cos_R1D, swapped_halves, signed_sin_R1D)
        out_R1HD = cache.attend(
            number,
            rotated[:, :H, None],
            rotated[:, H:, None],
            v_RKD[:, :, None],
            self.scaling,
        )
        x_RE = x_RE + self.o(out_R1HD.flatten(1))

        gate_up = self.gate_up(_norm(x_RE, self.mlp_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        return x_RE + self.down(self.activation(gate) * up)


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    """The RMS norm of ``x``: ``weight * x / sqrt(mean(x^2) + epsilon)``, over the last dimension.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    weight = norm.weight
    return torch.rms_norm(
        x.to(weight.dtype),
        weight.shape,
        weight,
        norm.variance_epsilon,
    )


def _product(*layers: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the concatenated outputs of these layers for one input.

    If the layers have a fused copy, the function computes a single product.
    """
    # The layers may also have been copied one by one, or not at all.
    first = layers[0]
    if isinstance(first, CopiedLinear) and len(first.fused.layers) == len(layers):
        return first.fused
    return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)

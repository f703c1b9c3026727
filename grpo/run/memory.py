"""What a rank will need, estimated before the first step: exact for weights, optimizer and cache, about right for activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    states: float
    """Weights, gradients, and Adam's two averages, all fp32."""
    reference: float
    cache: float
    """While sampling: keys and values of the completions at their longest, and copies of the weights (``grpo.rollout.weights``)."""
    activations: float
    """Of one micro-batch, kept for its backward pass; with the bf16 copies of the weights."""

    @property
    def peak(self) -> float:
        """Sampling and updating are not at the same time."""
        return self.states + self.reference + max(self.cache, self.activations)


def estimate(
    model_config: Any,
    num_parameters: int,
    *,
    precision: str,
    reference_bytes: float,
    gradient_checkpointing: bool,
    is_on_cpu: bool,
    tokens_in_flight: int,
    tokens_per_microbatch: int,
) -> Memory:
    """Memory of a decoder with gated MLPs (Llama, Qwen, Mistral, Gemma, ...); others are of the same order.

    Args:
        model_config: the text part of a transformers configuration.
        reference_bytes: of the reference's weights.
        tokens_in_flight, tokens_per_microbatch: prompt and completion tokens held at once while sampling, and while training.
    """
    layers, hidden, inner, kv_width = _sizes(model_config)
    is_bf16 = precision == "bf16"
    # Tensors that autograd keeps of one layer, in elements per token, counted on Qwen2 (tests/test_memory.py).
    kept = 2 * (20 * hidden + 3.5 * inner) if is_bf16 else 4 * (12 * hidden + 3.7 * inner)
    per_token = layers * 4 * 1.4 * hidden + kept if gradient_checkpointing else layers * kept
    return Memory(
        states=16.0 * num_parameters,
        reference=reference_bytes,
        cache=2.0 * layers * kv_width * (2 if is_bf16 and not is_on_cpu else 4) * tokens_in_flight
        + num_parameters * (2.0 if is_bf16 else 4.0 * is_on_cpu),
        activations=per_token * tokens_per_microbatch + 2.0 * num_parameters * is_bf16,
    )


def _sizes(config: Any) -> tuple[int, int, int, int]:
    def first(*names: str, default: int = 0) -> int:
        return next((value for name in names if (value := getattr(config, name, None))), default)

    hidden = first("hidden_size", "n_embd", "d_model")
    heads = first("num_attention_heads", "n_head", default=1)
    inner = first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    head_width = first("head_dim", default=hidden // heads)
    return (
        first("num_hidden_layers", "n_layer"),
        hidden,
        inner,
        head_width * first("num_key_value_heads", default=heads),
    )


def line(memory: Memory) -> str:
    """For the summary."""

    def spelled(size: float) -> str:
        return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.0f} MiB"

    parts = [f"weights, gradients and optimizer {spelled(memory.states)}"]
    if memory.reference:
        parts.append(f"reference {spelled(memory.reference)}")
    parts += [
        f"then cache and copies {spelled(memory.cache)} while sampling, activations {spelled(memory.activations)} in the update"
    ]
    return f"memory    about {spelled(memory.peak)} a rank: {', '.join(parts)}"

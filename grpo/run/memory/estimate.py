"""An estimate of the memory of a rank: exact for weights, optimizer and KV cache, approximate for activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from grpo.algorithm.logprobs import LOGITS_PER_CHUNK, LOGITS_PER_CHUNK_ON_CUDA
from grpo.distributed import local_bytes, share
from grpo.model import decoder_layers, num_parameters
from grpo.rollout import SamplingParams
from grpo.run.state import Run

GIB = 2**30
BYTES_PER_SCORED_LOGIT = 14
"""At the peak of the head's backward pass: the logits, their probabilities, and the gradient (counted in tests/run/test_memory.py). A mask
of the tokens that could be drawn takes one byte more."""
BYTES_PER_DRAWN_LOGIT, BYTES_PER_FILTERED_LOGIT = 20, 46
"""At the peak of drawing a token: logits, log-probs, probabilities, their sums; with top-k, top-p or min-p, sorted beside (counted there)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    states: float
    """Weights, gradients, and Adam's two averages, all fp32; with LoRA those of the adapters, and the frozen weights."""
    reference: float
    cache: float
    """While sampling: KV cache of the completions at their longest, and copies of the weights (``grpo.rollout.weights``)."""
    activations: float
    """Activations of one micro-batch that its backward pass needs, the logits of one chunk, and the bf16 copies of the weights that
    autocast makes."""

    @property
    def peak(self) -> float:
        """Bytes at the peak; sampling and updating do not happen at the same time."""
        return self.states + self.reference + max(self.cache, self.activations)


def estimate(
    model_config: Any,
    num_parameters: int,
    *,
    precision: str,
    reference_bytes: float,
    gradient_checkpointing: bool,
    on_cpu: bool,
    tokens_in_flight: int,
    tokens_per_microbatch: int,
    num_trained: int | None = None,
    average_bytes: float | None = None,
    frozen_bytes: float = 0.0,
    num_shards: int = 1,
    gathered_bytes: float = 0.0,
    samples_here: bool = True,
) -> Memory:
    """The memory of a decoder with gated MLPs (Llama, Qwen, Mistral, Gemma, ...); that of other models is of the same order.

    Args:
        model_config: the text part of a transformers configuration.
        reference_bytes: of the reference's weights, 0 without a reference.
        tokens_in_flight: most prompt and completion tokens in the KV cache while sampling.
        tokens_per_microbatch: most prompt and completion tokens in one forward and backward pass.
        num_trained: parameters that are trained, with LoRA those of the adapters; None: all.
        average_bytes: of Adam's two averages, over all shards; None: fp32.
        frozen_bytes: of the other parameters, on this rank.
        num_shards: ranks that share the states (FSDP).
        gathered_bytes: whole weights and gradients in an update under FSDP.
        samples_here: False where servers sample, which have the KV cache.
    """
    layers, hidden, inner, kv_width = sizes(model_config)
    bf16, num_trained = precision == "bf16", num_parameters if num_trained is None else num_trained
    # Bytes that autograd keeps of one layer for each token, counted on Qwen2 (tests/run/test_memory.py).
    per_layer = 2 * (20 * hidden + 3.5 * inner) if bf16 else 4 * (12 * hidden + 3.7 * inner)
    per_token = layers * 4 * 1.4 * hidden + per_layer if gradient_checkpointing else layers * per_layer
    cache_element = 2 if bf16 and not on_cpu else 4  # on the CPU keys and values are kept in fp32
    weight_copy = 2.0 if bf16 else 4.0 if on_cpu else 0.0  # on the CPU fp32 weights are copied in oneDNN's layout
    autocast_copy = 2.0 if bf16 else 0.0
    logits = min(
        tokens_per_microbatch * model_config.vocab_size, LOGITS_PER_CHUNK if on_cpu else LOGITS_PER_CHUNK_ON_CUDA
    )
    return Memory(
        states=(8.0 * num_trained + (8.0 * num_trained if average_bytes is None else average_bytes)) / num_shards
        + frozen_bytes,
        reference=reference_bytes,
        cache=(2.0 * layers * kv_width * cache_element * tokens_in_flight + weight_copy * num_parameters)
        * samples_here,
        activations=per_token * tokens_per_microbatch
        + BYTES_PER_SCORED_LOGIT * logits
        + autocast_copy * num_trained  # frozen weights are cast at every use, or are in bf16 already
        + gathered_bytes,
    )


def graph_pool_bytes(model_config: Any, sampling: SamplingParams, rows: int, longest_prompt: int) -> int:
    """Bytes of the memory pool of CUDA graphs, which outlives a rollout.

    Drawing a token makes tensors of vocabulary size, attention scores and weights of each layer: the larger of the two.
    """
    drawing = model_config.vocab_size * (BYTES_PER_FILTERED_LOGIT if sampling.is_filtered else BYTES_PER_DRAWN_LOGIT)
    attention = 14 * model_config.num_attention_heads * (longest_prompt + sampling.max_completion_length)
    return rows * max(drawing, attention)


def sizes(config: Any) -> tuple[int, int, int, int]:
    """Layers, hidden width, inner width of the MLP, width of all keys of one token."""

    def first(*names: str, default: int = 0) -> int:
        return next((value for name in names if (value := getattr(config, name, None))), default)

    hidden, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head", default=1)
    inner = first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    kv_width = first("head_dim", default=hidden // heads) * first("num_key_value_heads", default=heads)
    return first("num_hidden_layers", "n_layer"), hidden, inner, kv_width


def estimate_line(run: Run, longest_prompt: int) -> str:
    """The estimate for a run, as a line of its summary; ``longest_prompt`` in tokens."""
    return line(memory_of(run, longest_prompt))


def memory_of(run: Run, longest_prompt: int) -> Memory:
    """The estimate for a run; ``longest_prompt`` in tokens."""
    config, r = run.config, run.config.rollout
    model = run.policy.model
    # With LoRA the reference is the policy's own model.
    has_reference = run.ref_scorer is not None and run.ref_scorer.model is not model
    most = r.prompts_per_step * r.num_generations // run.world.size * (longest_prompt + r.max_completion_length)
    return estimate(
        model.config.get_text_config(),
        num_parameters(model),
        precision=config.runtime.precision,
        reference_bytes=local_bytes(run.ref_scorer.model) if has_reference else 0.0,
        num_trained=num_parameters(model, trained=True),
        average_bytes=_average_bytes(model) if config.optim.name == "adamw8bit" else None,
        frozen_bytes=sum(share(p).numel() * p.element_size() for p in model.parameters() if not p.requires_grad),
        gradient_checkpointing=config.model.gradient_checkpointing,
        on_cpu=run.world.device.type == "cpu",
        tokens_in_flight=min(run.sampling.tokens_in_flight or most, most),
        tokens_per_microbatch=min(run.tokens_per_microbatch, most),
        samples_here=r.engine == "builtin",
        **_divided(run),
    )


def _average_bytes(model: nn.Module) -> float:
    """Of the two averages with 8 bits: a byte a parameter and four a block of 256; embeddings have fp32."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    num_in_fp32 = sum(p.numel() for p in embeddings if p.requires_grad)
    return 8.0 * num_in_fp32 + 2 * (1 + 4 / 256) * (num_parameters(model, trained=True) - num_in_fp32)


def _divided(run: Run) -> dict[str, float]:
    """The arguments of :func:`estimate` about FSDP."""
    if not run.is_sharded:
        return {}
    model, weights = run.policy.model, num_parameters(run.policy.model)
    layers = decoder_layers(model)
    root = weights - sum(map(num_parameters, layers))
    gathered = (
        root
        + 2 * max(map(num_parameters, layers))
        + num_parameters(model, trained=True) * (not run.config.optim.reduce_each_microbatch)
    )
    return dict(num_shards=run.config.runtime.shard_size or run.world.size, gathered_bytes=4.0 * gathered)


def line(memory: Memory) -> str:
    """``memory    about 3.1 GiB a rank: ...``"""
    reference = f"reference {_size(memory.reference)}, " * bool(memory.reference)
    cache = f"then KV cache and weight copies {_size(memory.cache)} while sampling, " * bool(memory.cache)
    return (
        f"memory    about {_size(memory.peak)} a rank: weights, gradients and optimizer {_size(memory.states)}, {reference}{cache}"
        f"activations {_size(memory.activations)} in the update"
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.0f} MiB"

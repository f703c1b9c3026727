"""The memory that a GPU needs before activations and KV cache, by size of the model and kind of parallelism.

python -m grpo.run.memory.per_gpu          the table of docs/multi_gpu.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo.run.memory.estimate import sizes

STATES = 16
"""Bytes a parameter: weight, gradient and Adam's two averages, all fp32."""
ADAPTER_RANK = 16


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2 model, and of others with the same layers."""

    layers: int
    hidden: int
    kv_width: int
    inner: int
    vocab: int
    is_tied: bool
    qkv_bias: bool = True

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From the text part of a transformers configuration."""
        layers, hidden, inner, kv_width = sizes(config)
        has_bias = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
        return cls(layers, hidden, kv_width, inner, config.vocab_size, config.tie_word_embeddings, has_bias)

    @property
    def products(self) -> list[tuple[int, int]]:
        """``(inputs, outputs)`` of the linear layers of one decoder layer: q, k, v, o, gate, up, down."""
        h, kv, inner = self.hidden, self.kv_width, self.inner
        return [(h, h), (h, kv), (h, kv), (h, h), (h, inner), (h, inner), (inner, h)]

    @property
    def linear(self) -> int:
        """Parameters of the linear layers of one decoder layer."""
        biases = (self.hidden + 2 * self.kv_width) * self.qkv_bias
        return sum(inputs * outputs for inputs, outputs in self.products) + biases

    @property
    def layer(self) -> int:
        return self.linear + 2 * self.hidden

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of a head that is not tied to it."""
        return self.vocab * self.hidden

    @property
    def root(self) -> int:
        """Parameters in no layer: embedding, last norm, head."""
        return self.table * (1 if self.is_tied else 2) + self.hidden

    @property
    def total(self) -> int:
        return self.layers * self.layer + self.root

    @property
    def reference(self) -> int:
        """Bytes of a reference under bf16: linear layers in bf16, the rest (a tied head too) in fp32."""
        in_bf16 = self.layers * self.linear + (0 if self.is_tied else self.table)
        return 2 * in_bf16 + 4 * (self.total - in_bf16)

    @property
    def copies(self) -> int:
        """Bytes of the bf16 copies of all linear layers and the head: in rollouts, and of autocast in a forward and backward pass."""
        return 2 * (self.layers * self.linear + self.table)


def ddp_bytes(shape: Shape, *, reference: bool = True) -> int:
    return STATES * shape.total + shape.reference * reference + shape.copies


def fsdp_bytes(shape: Shape, shards: int, *, reference: bool = True, reduces_each_microbatch: bool = False) -> float:
    """On each of ``shards`` GPUs. The peak is a rollout or an update, whichever needs more.

    A rollout has an embedding and norms of its own in fp32. An update has the root group and two layers (one computes, the next is
    gathered) in fp32, and whole gradients while micro-batches add up, unless ``reduces_each_microbatch``.
    """
    own = shape.table + shape.hidden + shape.layers * 2 * shape.hidden
    rollout = 4 * own
    update = 4 * (shape.root + 2 * shape.layer) + (0 if reduces_each_microbatch else 4 * shape.total)
    return (STATES * shape.total + shape.reference * reference) / shards + shape.copies + max(rollout, update)


def lora_bytes(shape: Shape, rank: int = ADAPTER_RANK) -> int:
    """Base in bf16 with embedding, tied head and norms in fp32, and adapters of all linear layers but the head; the reference is the base."""
    adapters = shape.layers * sum(rank * (inputs + outputs) for inputs, outputs in shape.products)
    return shape.reference + STATES * adapters + shape.copies


QWEN = {
    "0.5B": Shape(24, 896, 128, 4864, 151936, True),
    "1.5B": Shape(28, 1536, 256, 8960, 151936, True),
    "3B": Shape(36, 2048, 256, 11008, 151936, True),
    "7B": Shape(28, 3584, 512, 18944, 152064, False),
    "14B": Shape(48, 5120, 1024, 13824, 152064, False),
    "32B": Shape(64, 5120, 1024, 27648, 152064, False),
}
"""Qwen2.5 by name."""


def table(shards: int = 8) -> str:
    """Markdown, in GB (10^9 bytes) a GPU."""
    header = f"| Qwen2.5 | parameters | DDP | FSDP on {shards} | FSDP on {shards}, `reduce_each_microbatch` | LoRA rank {ADAPTER_RANK} |"
    lines = [header, "|---|---|---|---|---|---|"]
    for name, shape in QWEN.items():
        figures = (
            ddp_bytes(shape),
            fsdp_bytes(shape, shards),
            fsdp_bytes(shape, shards, reduces_each_microbatch=True),
            lora_bytes(shape),
        )
        cells = " | ".join(f"{figure / 1e9:.0f}" for figure in figures)
        lines.append(f"| {name} | {shape.total / 1e9:.2f}B | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

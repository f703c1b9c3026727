"""The memory that a GPU needs before activations and KV cache, in GB (10^9 bytes): the table of docs/multi_gpu.md.

    python benchmarks/memory_per_gpu.py

Qwen2.5 with a reference under bf16. Weight, gradient and Adam's two averages are fp32: 16 bytes a parameter.
"""

ADAPTER_RANK, SHARDS = 16, 8
QWEN = {  # layers, hidden size, width of keys, MLP, vocabulary, whether the head is tied to the embedding
    "0.5B": (24, 896, 128, 4864, 151936, True),
    "1.5B": (28, 1536, 256, 8960, 151936, True),
    "3B": (36, 2048, 256, 11008, 151936, True),
    "7B": (28, 3584, 512, 18944, 152064, False),
    "14B": (48, 5120, 1024, 13824, 152064, False),
    "32B": (64, 5120, 1024, 27648, 152064, False),
}


def gigabytes(layers: int, hidden: int, kv: int, inner: int, vocab: int, is_tied: bool) -> tuple[float, ...]:
    """Parameters (in 10^9); then GB under DDP, FSDP, FSDP that averages gradients each micro-batch, and with LoRA."""
    products = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, inner)] * 2 + [(inner, hidden)]
    linear = sum(inputs * outputs for inputs, outputs in products) + hidden + 2 * kv  # of one layer, with biases
    layer, embedding = linear + 2 * hidden, vocab * hidden
    root = embedding * (1 if is_tied else 2) + hidden  # parameters in no layer
    total = layers * layer + root
    in_bf16 = layers * linear + (0 if is_tied else embedding)  # of the reference; the rest stays in fp32
    reference = 2 * in_bf16 + 4 * (total - in_bf16)
    copies = 2 * (layers * linear + embedding)  # in bf16: those of rollouts, and those of autocast in a pass
    sharded = (16 * total + reference) / SHARDS + copies
    rollout = 4 * (embedding + hidden + 2 * hidden * layers)  # gathered embedding and norms
    passes = 4 * (root + 2 * layer)  # gathered: the root, the layer that computes and the next one
    adapters = layers * sum(ADAPTER_RANK * (inputs + outputs) for inputs, outputs in products)
    figures = (
        total,
        16 * total + reference + copies,
        sharded + max(rollout, passes + 4 * total),  # whole gradients, while micro-batches add up
        sharded + max(rollout, passes),
        reference + 16 * adapters + copies,  # the reference is the frozen base
    )
    return tuple(figure / 1e9 for figure in figures)


if __name__ == "__main__":
    fsdp = f"FSDP on {SHARDS}"
    print(f"| Qwen2.5 | parameters | DDP | {fsdp} | {fsdp}, `reduce_each_microbatch` | LoRA rank {ADAPTER_RANK} |")
    print("|---|---|---|---|---|---|")
    for name, shape in QWEN.items():
        parameters, *figures = gigabytes(*shape)
        print(f"| {name} | {parameters:.2f}B | {' | '.join(f'{figure:.0f}' for figure in figures)} |")

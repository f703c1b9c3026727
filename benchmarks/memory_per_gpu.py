"""The memory that a GPU needs before activations and KV cache, in GB (10^9 bytes): the table of docs/multi_gpu.md.

    python benchmarks/memory_per_gpu.py

Qwen2.5 with a reference under bf16. Weight, gradient and Adam's two averages are fp32: 16 bytes a parameter. The second
table is that of docs/one_gpu.md: an update and a rollout of configs/gsm8k_qwen2.5_0.5b.yaml, which has no reference.
"""

ADAPTER_RANK = 16
SHARDS = 8
QWEN = {  # layers, hidden size, width of keys, MLP, vocabulary, whether the head is tied to the embedding
    "0.5B": (24, 896, 128, 4864, 151936, True),
    "1.5B": (28, 1536, 256, 8960, 151936, True),
    "3B": (36, 2048, 256, 11008, 151936, True),
    "7B": (28, 3584, 512, 18944, 152064, False),
    "14B": (48, 5120, 1024, 13824, 152064, False),
    "32B": (64, 5120, 1024, 27648, 152064, False),
}

SAVED = {"0.5B": (77120, 70176, 3584), "1.5B": (137672, 125608, 6144)}
"""Bytes that a layer saves for the backward pass per token, counted by ``torch.autograd.graph.saved_tensors_hooks`` in
packed scoring under bf16 autocast: all weights trained, LoRA, and with ``model.gradient_checkpointing``."""


def gigabytes(
    layers: int,
    hidden: int,
    kv: int,
    inner: int,
    vocab: int,
    is_tied: bool,
) -> tuple[float, ...]:
    """Parameters (in 10^9); then GB under DDP, under FSDP and with LoRA."""
    products = [
        *[(hidden, hidden)] * 2,
        *[(hidden, kv)] * 2,
        *[(hidden, inner)] * 2,
        (inner, hidden),
    ]
    biases = hidden + 2 * kv
    linear = sum(inputs * outputs for inputs, outputs in products) + biases  # of one layer
    layer = linear + 2 * hidden
    embedding = vocab * hidden
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
        reference + 16 * adapters + copies,  # the reference is the frozen base
    )
    return tuple(figure / 1e9 for figure in figures)


def one_gpu(
    name: str,
    tokens: int,
    *,
    lora: bool,
    checkpointing: bool = False,
) -> tuple[float, ...]:
    """GB of weights, gradients, Adam, bf16 weights, activations, head; of KV cache and drawing in the evaluation."""
    layers, hidden, kv, _, vocab, _ = QWEN[name]
    total, *_, with_lora = (round(figure * 1e9) for figure in gigabytes(*QWEN[name]))
    linear = total - vocab * hidden - hidden * (2 * layers + 1)
    embedding = vocab * hidden
    base = 2 * linear + 4 * (total - linear)
    adapters = (with_lora - base - 2 * (linear + embedding)) // 16
    trained, weights = (adapters, base + 4 * adapters) if lora else (total, 4 * total)
    full, frozen, inputs = SAVED[name]
    saved = frozen if lora else full
    activations = tokens * (layers * inputs + saved if checkpointing else layers * saved)
    chunk = -(-(2**27) // vocab) * vocab  # logits: in bf16, and two tensors in fp32
    head = 10 * chunk + (0 if lora else 6 * embedding)  # and the gradient of the head before it is added
    casts = 2 * (embedding if lora else linear + embedding)
    # of an evaluation: completions at once; tokens of prompt and completion
    rows = 256
    longest = 300 + 512
    cache = rows * longest * 2 * layers * kv * 2
    update = (weights, 4 * trained, 8 * trained, casts, activations, head)
    rollout = (
        cache,
        rows * vocab * 20,
        weights + 8 * trained + 2 * (linear + embedding),
    )
    return tuple(
        x / 1e9
        for x in (
            *update,
            sum(update),
            *rollout[:2],
            sum(rollout),
        )
    )


if __name__ == "__main__":
    print(f"| Qwen2.5 | parameters | DDP | FSDP on {SHARDS} | LoRA rank {ADAPTER_RANK} |")
    print("|---|---|---|---|---|")
    for name, shape in QWEN.items():
        parameters, *figures = gigabytes(*shape)
        cells = " | ".join(f"{figure:.0f}" for figure in figures)
        print(f"| {name} | {parameters:.2f}B | {cells} |")
    columns = "weights, gradients, Adam, bf16 weights, activations, head, **update**, KV cache, drawing, **evaluation**"
    print(f"\n| Qwen2.5 | trained | tokens at once | {columns.replace(', ', ' | ')} |{chr(10)}{'|---' * 13}|")
    for name in SAVED:
        for method in (
            {"lora": False},
            {"lora": True},
            {"lora": False, "checkpointing": True},
        ):
            for tokens in (16384, 4096):
                words = "LoRA" if method["lora"] else "all, checkpointing" if len(method) == 2 else "all"
                figures = " | ".join(f"{figure:.1f}" for figure in one_gpu(name, tokens, **method))
                print(f"| {name} | {words} | {tokens:,} | {figures} |")

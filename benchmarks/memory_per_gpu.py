"""The memory that a GPU needs before activations and KV cache, in GB (10^9 bytes): the table of
docs/multi_gpu.md.

    python benchmarks/memory_per_gpu.py

Qwen2.5 with a reference under bf16. Weight, gradient and Adam's two averages are fp32: 16 bytes a
parameter. The second table is that of docs/one_gpu.md: an update and a rollout of
configs/gsm8k_qwen2.5_0.5b.yaml, which has no reference."""

import math

from common import markdown

ADAPTER_RANK = 16
SHARDS = 8
QWEN = {
    # Layers, hidden size, width of keys, MLP, vocabulary, is the head tied to the embedding.
    "0.5B": (24, 896, 128, 4864, 151936, True),
    "1.5B": (28, 1536, 256, 8960, 151936, True),
    "3B": (36, 2048, 256, 11008, 151936, True),
    "7B": (28, 3584, 512, 18944, 152064, False),
    "14B": (48, 5120, 1024, 13824, 152064, False),
    "32B": (64, 5120, 1024, 27648, 152064, False),
}

SAVED = {"0.5B": (77120, 70176, 3584), "1.5B": (137672, 125608, 6144)}
"""Bytes that a layer saves for the backward pass per token, counted by
``torch.autograd.graph.saved_tensors_hooks`` in packed scoring under bf16 autocast: all weights
trained, LoRA, and with ``model.gradient_checkpointing``."""


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
    # The reference has its linear layers in bf16. The rest stays in fp32.
    in_bf16 = layers * linear
    if not is_tied:
        in_bf16 += embedding
    reference = 2 * in_bf16 + 4 * (total - in_bf16)
    # In bf16: the weights of rollouts, and those of autocast in a pass.
    copies = 2 * (layers * linear + embedding)
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
    checkpointing: bool,
) -> list[float]:
    """GB of weights, gradients, Adam, bf16 weights, activations, head; of KV cache and drawing in
    the evaluation."""
    layers, hidden, kv, _, vocab, _ = QWEN[name]
    total, _, _, with_lora = [round(figure * 1e9) for figure in gigabytes(*QWEN[name])]
    linear = total - vocab * hidden - hidden * (2 * layers + 1)
    embedding = vocab * hidden
    copies = 2 * (linear + embedding)
    # Logits of a chunk: in bf16, and two tensors in fp32, together 10 bytes each.
    chunk_tokens = math.ceil(2**27 / vocab)
    head = 10 * chunk_tokens * vocab
    full, frozen, inputs = SAVED[name]
    if lora:
        base = 2 * linear + 4 * (total - linear)
        trained = (with_lora - base - copies) // 16
        weights = base + 4 * trained
        casts = 2 * embedding
        saved = frozen
    else:
        trained = total
        weights = 4 * total
        casts = copies
        saved = full
        head += 6 * embedding  # and the gradient of the head before it is added
    # With checkpointing, the inputs of all layers are saved, and the rest of one layer at a time.
    bytes_per_token = layers * saved
    if checkpointing:
        bytes_per_token = layers * inputs + saved
    activations = tokens * bytes_per_token
    update = [weights, 4 * trained, 8 * trained, casts, activations, head]
    # An evaluation: 256 completions at once, of 300 tokens of prompt and 512.
    cache = 256 * 812 * 2 * layers * kv * 2
    drawing = 256 * vocab * 20
    evaluation = cache + drawing + weights + 8 * trained + copies
    figures = [*update, sum(update), cache, drawing, evaluation]
    return [figure / 1e9 for figure in figures]


if __name__ == "__main__":
    columns = ["Qwen2.5", "parameters", "DDP", f"FSDP on {SHARDS}", f"LoRA rank {ADAPTER_RANK}"]
    rows = []
    for name, shape in QWEN.items():
        parameters, *figures = gigabytes(*shape)
        cells = [f"{figure:.0f}" for figure in figures]
        rows.append([name, f"{parameters:.2f}B", *cells])
    print(markdown(columns, rows))

    columns = [
        "Qwen2.5",
        "trained",
        "tokens at once",
        "weights",
        "gradients",
        "Adam",
        "bf16 weights",
        "activations",
    ]
    columns += ["head", "**update**", "KV cache", "drawing", "**evaluation**"]
    rows = []
    for name in SAVED:
        for trained in ("all", "LoRA", "all, checkpointing"):
            for tokens in (16384, 4096):
                figures = one_gpu(
                    name,
                    tokens,
                    lora=trained == "LoRA",
                    checkpointing="checkpointing" in trained,
                )
                cells = [f"{figure:.1f}" for figure in figures]
                rows.append([name, trained, f"{tokens:,}", *cells])
    print(markdown(columns, rows), end="")

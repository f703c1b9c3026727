"""The bound that memory sets to sampling: bytes to read over the bandwidth of a copy."""

import statistics
import time

import torch


def copy_bandwidth(device) -> float:
    """Bytes a second that a copy of 256 MiB reads and writes."""
    source = torch.zeros(2**28, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(10):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(seconds)


def bound_seconds(model, lengths_UG, prompt: int, precision: str, bandwidth: float) -> float:
    """To read weights, and each prompt's and each row's keys and values, once a step; the prefill is left out."""
    c, size = model.config, 2 if precision == "bf16" else 4
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * width * size
    weights = size * sum(p.numel() for p in model.parameters())
    total = 0.0
    for t in range(1, int(lengths_UG.max())):
        alive_UG = lengths_UG > t
        total += weights + per_token * (prompt * int(alive_UG.any(dim=1).sum()) + t * int(alive_UG.sum()))
    return total / bandwidth

"""Read what a run wrote."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from grpo.distributed import load_tensors

TIMES = ("step_time", "tokens_per_second", "time/")
"""Metrics, or their prefix, that differ between two equal runs."""


def metrics_of(output: Path) -> list[dict]:
    """``metrics.jsonl``. Floats are written so that they read back as the same bits."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def lines(output: Path) -> list[dict]:
    """``metrics.jsonl`` without times."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in metrics_of(output)]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint or any other model folder."""
    return load_file(checkpoint / "model.safetensors")


def states(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of the optimizer and of a moving reference, each whole, whatever number of ranks
    wrote them."""
    folder = checkpoint / "trainer" / "states"
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in described.items()
    }
    load_tensors(found, folder)
    return found


def assert_same_weights(one: Path, other: Path) -> None:
    """Tolerance 0."""
    first = weights(one)
    second = weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name

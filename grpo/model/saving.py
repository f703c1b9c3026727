"""Writes a model, or an adapter, as a Hugging Face folder."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig

MAX_FILE_BYTES = 5 * 10**9
"""Largest file of weights, as in the folders that transformers writes; a single larger tensor has a file of its own."""


def save_weights(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a Hugging Face folder with the given weights, or the files of an adapter, without a tokenizer."""
    # transformers refuses to save a generation config with inconsistent values (a temperature without do_sample). A run must not fail
    # at its end because of a file it does not use: the original is written without that check.
    if (original := getattr(model, "generation_config", None)) is None:
        model.save_pretrained(folder, state_dict=weights)
        return
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = original
    original.to_json_file(str(folder / "generation_config.json"))


def saved_tensors(model: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, a tied one once, or with ``tied`` under each of its names, and the buffers that a model folder has."""
    yield from model.named_parameters(remove_duplicate=not tied)
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def file_parts(
    model: nn.Module, max_bytes: int = MAX_FILE_BYTES, *, tied: bool = False
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of each file of a model folder; ``tied`` as in :func:`saved_tensors`."""
    part, size = [], 0
    for name, tensor in saved_tensors(model, tied=tied):
        num_bytes = tensor.numel() * tensor.element_size()
        if part and size + num_bytes > max_bytes:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += num_bytes
    yield part

"""Writes a model, or an adapter, as a Hugging Face folder."""

from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig


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

"""Merges an adapter into its model: a Hugging Face folder that every program loads without peft."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo.model.loading import load_tokenizer, load_weights, resolve_model
from grpo.model.lora import base_of, read_adapter_config, read_adapter_weights, scale_of
from grpo.model.saving import save_weights


def write_merged(adapter: str | Path, output: str | Path, *, trust_remote_code: bool = False) -> None:
    """Write the model of an adapter folder with weights ``W + scale * B @ A``, in fp32, and its tokenizer.

    The weights ``W`` are read from the model's own files: those that a run has in memory may be rounded to bf16.

    Raises:
        ValueError: if the folder holds no adapter, or if its model cannot be loaded or does not fit.
    """
    adapter, output = str(adapter), Path(output)
    base = base_of(adapter, "adapter")
    setting = f"adapter={adapter}: its model"
    base = resolve_model(base, "", trust_remote_code=trust_remote_code, setting=setting)
    model = load_weights(base, setting, dtype=torch.float32, trust_remote_code=trust_remote_code)
    merge_into(model, adapter)
    output.mkdir(parents=True)
    save_weights(model, model.state_dict(), output)
    load_tokenizer(adapter, trust_remote_code=trust_remote_code, setting="adapter").save_pretrained(output)


@torch.no_grad()
def merge_into(model: PreTrainedModel, adapter: str) -> None:
    """Add ``scale * B @ A`` to each adapted weight of the plain model, in place; ValueError if the adapter does not fit."""
    scale = scale_of(read_adapter_config(adapter, "adapter"))
    weights = read_adapter_weights(adapter, "adapter")
    for name in sorted({key.removesuffix(".weight").rpartition(".")[0] for key in weights}):
        try:
            layer = model.get_submodule(name)
            change = scale * weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
            layer.weight += change.T if isinstance(layer, Conv1D) else change
        except (AttributeError, KeyError, RuntimeError) as error:
            raise ValueError(f"adapter={adapter} does not fit its model at {name}: {error}") from None

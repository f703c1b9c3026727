"""Scenarios on the emulated CUDA device (:mod:`emulated_cuda`); the tests are in ``test_*.py`` beside."""

import json
from pathlib import Path

import torch
from conftest import save_random_model, small_run
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import train_grpo
from grpo.tasks.tiny import build_tokenizer

SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.3,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 256,
}
ARCHITECTURES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 16}),
}


def save_model(folder: Path, architecture: str) -> Path:
    """A Hugging Face folder with a small random model and the tiny tokenizer."""
    if architecture == "qwen2":
        return save_random_model(folder)
    model, config, options = ARCHITECTURES[architecture]
    tokenizer = build_tokenizer()
    tokens = dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(1)
    model(config(**SIZES, **tokens, pad_token_id=tokenizer.pad_token_id, **options)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trains(folder, *, architecture="qwen2", settings=()):
    """``train_grpo.py`` for two steps on a small random model; its exit code and metrics."""
    model = save_model(Path(folder) / "model", architecture)
    short = ["optim.max_steps=2", "eval.max_samples=8", "eval.before_training=false"]
    code = train_grpo.main([*small_run(model, Path(folder) / "run"), "runtime.device=cuda", *short, *settings])
    metrics = Path(folder) / "run" / "metrics.jsonl"
    return {"code": code, "lines": [json.loads(line) for line in metrics.read_text().splitlines()]}


def adds_up(count):
    x = torch.ones(count, device="cuda")
    total = x.sum()
    assert total.device == x.device and x.is_cuda
    return total.item()


def mixes_devices():
    try:
        torch.ones(3, device="cuda") + torch.ones(3)
    except RuntimeError as error:
        return str(error)

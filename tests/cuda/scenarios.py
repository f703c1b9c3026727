"""Scenarios on the emulated CUDA device (:mod:`emulated_cuda`); the tests are in ``test_*.py`` beside."""

import json
from pathlib import Path

import torch
from conftest import save_random_model, small_run

import train_grpo


def mixes_devices():
    try:
        torch.ones(3, device="cuda") + torch.ones(3)
    except RuntimeError as error:
        return str(error)


def adds_up(count):
    x = torch.ones(count, device="cuda")
    total = x.sum()
    assert total.device == x.device and x.is_cuda
    return total.item()


def trains(folder, *, architecture="qwen2", settings=()):
    """``train_grpo.py`` for two steps on a small random model."""
    model = save_random_model(Path(folder) / "model")
    arguments = small_run(model, Path(folder) / "run")
    arguments += [
        "runtime.device=cuda",
        "optim.max_steps=2",
        "eval.max_samples=8",
        "eval.before_training=false",
        *settings,
    ]
    code = train_grpo.main(arguments)
    lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines() if code == 0 else []
    return {"code": code, "lines": [json.loads(line) for line in lines]}

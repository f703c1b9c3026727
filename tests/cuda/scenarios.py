"""Scenarios on the emulated CUDA device (:mod:`emulated_cuda`); the tests are beside."""

import json
import sys
from pathlib import Path

import torch
from conftest import ROOT, save_random_model, small_run
from emulated_cuda.tensors import CUDA, device

import train_grpo
from grpo.rollout import cuda_graphs

sys.path.insert(0, f"{ROOT}/benchmarks")
import gpu


def trains(folder, settings):
    """``train_grpo.py`` for two steps on a small random model; its metrics."""
    arguments = [
        *small_run(save_random_model(Path(folder, "model")), Path(folder, "run")),
        "runtime.device=cuda",
        "optim.max_steps=2",
        "eval.before_training=false",
        "data.max_eval_samples=1",
    ]
    assert train_grpo.main([*arguments, *settings]) == 0
    lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def benchmark(folder, only, mistake=None):
    """``gpu.py`` with a planted mistake; results by name."""
    gpu.figures.matmul_rate = lambda *_: 1.0
    match mistake:
        case "other position":  # captured steps rotate by one position too many
            begin = cuda_graphs.FixedWidthCache.begin_token
            cuda_graphs.FixedWidthCache.begin_token = lambda cache: begin(cache) + 1
        case "freed memory":
            add_to_layer(reads_what_is_freed)
        case "host sync":
            add_to_layer(lambda module, inputs, output: output * float(output.max() > -1e9))
    names = [f"--only={name}" for name in only]
    code = gpu.main(["--shape=small", f"--output={folder}", *names])
    rows = json.loads(Path(folder, "gpu_part.json").read_text())
    return {"code": code} | {row["name"]: row["result"] for row in rows}


def add_to_layer(hook):
    policy_of = gpu.Bench.policy

    def policy(self, precision):
        result = policy_of(self, precision)
        result.backbone.layers[0].mlp.act_fn.register_forward_hook(hook)
        return result

    gpu.Bench.policy = policy


def reads_what_is_freed(module, inputs, output):
    if device.is_capturing():
        return output + vars(module).pop("stored")
    module.stored = torch.zeros(output.shape[-1], device=CUDA)
    return output

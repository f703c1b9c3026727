"""Scenarios on the emulated CUDA device (:mod:`emulated_cuda`); the tests are beside."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from conftest import ROOT, save_random_model, small_run
from emulated_cuda.tensors import CUDA, device

import train_grpo
from grpo.attention import packed
from grpo.rollout import cuda_graphs
from grpo.run import memory

sys.path.insert(0, f"{ROOT}/benchmarks")
import gpu


def trains(folder, settings):
    """``train_grpo.py`` for two steps on a small random model; its metrics."""
    arguments = small_run(save_random_model(Path(folder, "model")), Path(folder, "run"))
    short = ["runtime.device=cuda", "optim.max_steps=2", "eval.before_training=false", "data.max_eval_samples=1"]
    assert train_grpo.main([*arguments, *short, *settings]) == 0
    lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def evaluates(expression):
    """An expression in a graph, on a device with 1 MiB."""
    ones = torch.ones(4, device=CUDA)
    device.memory_limit = 2**20
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        eval(expression, {"torch": torch, "ones": ones})


def survives(folder):
    """``gpu.py`` with a check that crashes, one that hangs and one that passes."""
    gpu.FIGURES["machine"] = (lambda bench: {},)
    gpu.CHECKS = {
        "crashes": (lambda bench: os.kill(os.getpid(), signal.SIGSEGV),),
        "hangs": (lambda bench: time.sleep(60),),
        "passes": (lambda bench: {"number": 1.5},),
    }
    gpu.LIMIT_S = 3
    return benchmark(folder, only=["crashes", "hangs", "passes"])


def benchmark(folder, only, mistake=None):
    """``gpu.py`` with a planted mistake; results by name."""
    gpu.figures.matmul_rate = gpu.figures.copy_bandwidth = lambda *_: 1.0
    gpu.JOBS = gpu.FIGURES | gpu.CHECKS
    match mistake:
        case "other position":  # captured steps rotate by one position too many
            begin = cuda_graphs.FixedWidthCache.begin_token
            cuda_graphs.FixedWidthCache.begin_token = lambda cache: begin(cache) + 1
        case "freed memory":
            add_to_layer(reads_what_is_freed)
        case "host sync":
            add_to_layer(lambda module, inputs, output: output * float(output.max() > -1e9))
        case "wrong kernel":  # attention of packed rows is 3% too large if a backward pass is to follow
            attention = packed.packed_attention
            packed.packed_attention = lambda q, *more: attention(q, *more) * (1 + 0.03 * q.requires_grad)
        case "short trial":  # the try of the largest step leaves out the update
            memory.microbatch_rows = lambda *_, **__: []
    arguments = ["--shape=small", f"--output={folder}"]
    for name in only:
        arguments += ["--only", name]
    code = gpu.main(arguments)
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

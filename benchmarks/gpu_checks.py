"""Checks of ``gpu.py``: CUDA graphs beside the decode loop, and short runs of the trainer.

The docstring of a check's function is its criterion. Each check has a process of its own, and so
may replace functions for good.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from multiprocessing import Process
from os.path import commonprefix
from pathlib import Path
from unittest import SkipTest
from unittest.mock import Mock, patch

import torch
from common import ROOT
from gpu_step import Bench, forked

from grpo.algorithm.batch import Group
from grpo.algorithm.logprobs import CompletionScorer
from grpo.rollout import BuiltinEngine, SamplingParams, check_model, cuda_graphs

NEEDED = ("pydantic", "cloudpickle", "pyarrow")
MISSING = [name for name in NEEDED if find_spec(name) is None]
if not MISSING:
    import train_grpo

# The number of different digits in a completion, from which random models get a gradient, too.
REWARD = "{name: tag_groups, args: {pattern: (1)|(2)|(3)|(4)|(5)|(6)|(7)|(8)|(9), max_value: 1.0}}"
COMPARED = ("reward", "num_tokens", "loss", "kl", "grad_norm")
LIMITS = {"fp32": (0.9, 1e-3), "bf16": (0.15, 0.5)}
"""Least share of equal tokens, most distance of log-probs. In bf16 rounding changes most rows: an
H100 had shares from 0.30 to 0.74."""


def agreement(groups: list[Group], others: list[Group]) -> tuple[float, float]:
    """The share of tokens before a row's first difference, and the mean distance of log-probs."""
    tokens = 0
    equal = 0
    distance = 0.0
    for group, other in zip(groups, others, strict=True):
        for row, expected in zip(group.completions, other.completions, strict=True):
            tokens += max(len(row.ids), len(expected.ids))
            # Compares tuples element by element.
            same = len(commonprefix([row.ids, expected.ids]))  # noqa: RUF071
            equal += same
            # Greedy rows have no log-probs.
            for n, logprob in enumerate(row.sampling_logprobs[:same]):
                distance += abs(logprob - expected.sampling_logprobs[n])
    return equal / tokens, distance / equal


def graphs(precision: str, bench: Bench) -> dict:
    """graphs sample what the loop does, also after an update; a failed capture falls back"""
    bench.need_gpu()
    cases = {
        "sampled": SamplingParams(4, 48),
        "greedy": SamplingParams(4, 48, temperature=0.0),
        "filtered": SamplingParams(
            4,
            48,
            temperature=0.8,
            top_p=0.9,
            top_k=20,
            min_p=0.01,
        ),
        # Nearly every token is a number after a space: a string with a space lies in two tokens.
        "stops": SamplingParams(4, 48, stop=("3 ", "5 ", "8 ")),
        "waves": SamplingParams(4, 48, tokens_in_flight=1000),
        "updated": SamplingParams(4, 48),
    }
    policy = bench.policy(precision)
    check_model(policy, CompletionScorer(policy.model))
    # Rows end at many lengths.
    policy.eos_ids = tuple(range(2, policy.model.config.vocab_size, 25))
    # A step is captured anew for more own tokens, too.
    cuda_graphs.COMPLETION_BUCKET = 16
    problems = bench.problems(3, 20, 70, 200)
    said = []
    engine = BuiltinEngine(policy, cuda_graphs=True, warn=said.append)
    loop = BuiltinEngine(policy, fast_decode=False)
    least_equal, most_distance = LIMITS[precision]
    found = {}
    key = (0, "gpu", 0)
    for name, sampling in cases.items():
        if name == "updated":
            torch.manual_seed(0)
            # More than by an update, so that stale weights show.
            for p in policy.model.parameters():
                scale = 0.05 * float(p.detach().std())
                p.data.add_(torch.randn_like(p), alpha=scale)
        captured = Mock(side_effect=torch.cuda.CUDAGraph)
        with patch.object(torch.cuda, "CUDAGraph", captured):
            groups = engine.generate(problems, sampling, seed_key=key)
        expected = loop.generate(problems, sampling, seed_key=key)
        equal, distance = agreement(groups, expected)
        captures = captured.call_count
        found[name] = [captures, equal, distance]
        # Nearly always some row has more than 24 tokens, for which a step is captured again.
        least = {"stops": 1, "waves": 3}.get(name, 2)
        is_right = captures >= least and equal >= least_equal and distance < most_distance
        assert is_right and not said, f"captures, equal tokens, distance: {found}, {said}"

    def waits_in_capture(module, inputs, output):
        if torch.cuda.is_current_stream_capturing():
            output.sum().item()

    policy.backbone.layers[0].mlp.act_fn.register_forward_hook(waits_in_capture)
    equal, _ = agreement(engine.generate(problems, sampling, seed_key=key), expected)
    assert said and equal >= least_equal, f"failed capture: {equal:.0%} equal tokens, {said}"
    return found


def start(bench: Bench, name: str, *settings: str) -> Process:
    """Start a short run in ``scratch/<name>``."""
    if MISSING:
        raise SkipTest(f"no {MISSING[0]}")
    arguments = [
        f"--config={ROOT}/configs/tiny_arithmetic.yaml",
        f"model.name_or_path={bench.scratch}/small",
        f"output_dir={bench.scratch}/{name}",
        f"runtime.device={bench.device.type}",
        f"reward.functions=[{REWARD}]",
        "rollout={prompts_per_step: 2, num_generations: 4, max_completion_length: 12}",
        "optim.max_steps=8",
        "runtime.deterministic=true",
        "runtime.try_largest_step=false",
        "runtime.threads_per_rank=1",
        "algorithm.beta=0.04",
        "checkpoint={save_steps: 1, keep: 100}",
        "eval.before_training=false",
        "data.max_eval_samples=1",
        *settings,
    ]

    return forked(lambda: sys.exit(train_grpo.main(arguments)), bench.scratch / f"{name}.txt")


def complete(run: Process, code: int = 0) -> str:
    """Wait for a run and expect this exit code. Returns its output."""
    run.join()
    text = Path(run.name).read_text(errors="replace")
    assert run.exitcode == code, f"{run.name}: exit code {run.exitcode}: {text[-300:]}"
    return text


def metrics(bench: Bench, name: str) -> list[dict]:
    """Some metrics of each step."""
    rows = []
    for line in (bench.scratch / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.append({what: row[what] for what in COMPARED})
    return rows


def kill_and_resume(bench: Bench) -> dict:
    """a run ended by kill -9 and continued has the weights of one that was not, to the bit"""
    killed = start(bench, "killed")
    saved = bench.scratch / "killed/checkpoint-1/manifest.json"
    while killed.is_alive() and not saved.exists():
        time.sleep(0.005)
    killed.kill()
    complete(killed, code=-9)
    complete(start(bench, "killed"))
    complete(start(bench, "whole"))
    rows = metrics(bench, "killed")
    continued = bench.scratch / "killed/checkpoint-8/model.safetensors"
    whole = bench.scratch / "whole/checkpoint-8/model.safetensors"
    assert continued.read_bytes() == whole.read_bytes()
    assert any(row["grad_norm"] > 0 for row in rows)
    return {"steps": len(rows)}


def nccl(bench: Bench) -> dict:
    """with two GPUs two ranks, else one, take the first step of a run without a process group, to
    1e-3"""
    bench.need_gpu()
    size = min(torch.cuda.device_count(), 2)
    settings = (
        "runtime.precision=fp32",
        "runtime.deterministic=false",
        "optim.max_steps=1",
    )
    runs = [start(bench, "alone", *settings)]
    os.environ.update(
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29510",
        GRPO_TEST_COLLECTIVES="1",
    )
    for rank in range(size):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        runs.append(start(bench, f"nccl-{rank}", *settings, f"output_dir={bench.scratch}/nccl"))
    for run in runs:
        complete(run)
    (found,) = metrics(bench, "nccl")
    (expected,) = metrics(bench, "alone")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    return found

"""Figures of ``gpu.py``: milliseconds and kernels a token, memory and speed of an update, a whole step beside TRL's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import torch
import update
from bandwidth import bound_seconds, copy_bandwidth
from gpu_common import ROOT, Bench, Found, NotRun, expect, figure

from grpo.rollout import BuiltinEngine, SamplingParams

GROUP, PROMPT = 8, 256


def sampler(bench: Bench, side: str, rows: int) -> tuple[Callable[[int], None], torch.nn.Module]:
    """A function that samples so many tokens for each of the rows, none of which ends before, and its model."""
    is_ours = side in ("graphs", "loop")
    policy, problems = bench.policy("bf16", packed=is_ours), bench.problems((PROMPT,) * (rows // GROUP))
    if is_ours:
        said: list[str] = []
        engine = BuiltinEngine(policy, cuda_graphs=side == "graphs", warn=said.append)

        def sample(tokens: int) -> None:
            engine.generate(problems, SamplingParams(GROUP, tokens), address=(0, "gpu", 0))
            expect(not said, "; ".join(said))

        return sample, policy.model

    # In bf16 weights, which is fastest for it, and which its static cache needs.
    model = policy.model.bfloat16()
    model.generation_config.eos_token_id = None
    prompts_RL = torch.tensor([p.prompt_ids for p in problems]).repeat_interleave(GROUP, dim=0).to(bench.device)
    options = dict(
        attention_mask=torch.ones_like(prompts_RL), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )
    if side == "static":  # transformers compiles the decode steps of a static cache on CUDA
        options["cache_implementation"] = "static"

    def generate(tokens: int) -> None:
        with torch.no_grad():
            out = model.generate(prompts_RL, max_new_tokens=tokens, **options)
        expect(out.shape[1] == PROMPT + tokens, f"{out.shape[1] - PROMPT} tokens instead of {tokens}")

    return generate, model


def seconds(sample: Callable[[int], None], tokens: int) -> float:
    """The second of two runs: the first captures or compiles."""
    for _ in range(2):
        started = time.perf_counter()
        sample(tokens)
        torch.cuda.synchronize()
        taken = time.perf_counter() - started
    return taken


def kernels(sample: Callable[[int], None], tokens: int) -> Counter:
    """Kernels, and launches by the host, of one run."""
    sample(tokens)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        sample(tokens)
        torch.cuda.synchronize()
    count = Counter()
    for event in profile.events():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(
            ("Memcpy", "Memset")
        )
        count["kernels"] += is_kernel
        count["launches"] += event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"))
    return count


def sampling(bench: Bench, side: str, rows: int) -> Found:
    bench.need_real_gpu("time")
    tokens = 129 if side in ("graphs", "static") else 65
    sample, model = sampler(bench, side, rows)
    first, whole = seconds(sample, 1), seconds(sample, tokens)
    bound = bound_seconds(
        model, torch.full((rows // GROUP, GROUP), tokens), PROMPT, "bf16", copy_bandwidth(bench.device)
    )
    found = {
        "ms/token": 1e3 * (whole - first) / (tokens - 1),
        "tokens/s": rows * tokens / whole,
        "prefill ms": 1e3 * first,
    }
    found["share of bandwidth bound"] = bound / (whole - first)
    few, more = kernels(sample, 9), kernels(sample, 17)
    return found | {f"{what}/token": (more[what] - few[what]) / 8 for what in ("kernels", "launches")}


def register_sampling(side: str, rows: int, about: str, limit_s: float) -> None:
    def measured(bench: Bench) -> Found:
        return sampling(bench, side, rows)

    measured.__name__, measured.__doc__ = f"{side}_{rows}", f"{about}, {rows} rows in groups of {GROUP}, bf16"
    figure(limit_s)(measured)


for number in (32, 256):
    register_sampling("graphs", number, "decode steps as CUDA graphs", 60)
    register_sampling("loop", number, "the decode loop", 60)
    register_sampling("dynamic", number, "generate with a dynamic cache, bf16 weights", 60)


def update_figures(bench: Bench, side: str) -> Found:
    bench.need_real_gpu("time")
    sizes = dict(prompts=8, group=8, prompt=256, completion=512, tokens_per_microbatch=16384)
    return update.measure(
        SimpleNamespace(
            model=str(bench.model_folder),
            vocabulary=None,
            device="cuda",
            precision="bf16",
            threads=4,
            side=side,
            **sizes,
        )
    )


@figure(60)
def update_packed(bench: Bench) -> Found:
    """forward and backward of 64 completions of 128 to 512 tokens after 8 prompts of 256, packed; utilisation is of a matrix product here"""
    return update_figures(bench, "packed")


@figure(60)
def update_padded(bench: Bench) -> Found:
    """the same in padded rows"""
    return update_figures(bench, "padded")


@figure(180)
def step_beside_trl(bench: Bench) -> Found:
    """a whole step beside TRL's, seconds per 1,000 completion tokens"""
    bench.need_real_gpu("time")
    for package in ("pydantic", "datasets", "trl"):
        if importlib.util.find_spec(package) is None:
            raise NotRun(f"no {package}")
    output, data = bench.scratch / "trl", bench.scratch / "questions.jsonl"
    rows = [{"question": f"What is {n} + {n + 1}?", "answer": f"#### {2 * n + 1}"} for n in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(ROOT / "benchmarks" / "compare_trl.py"), "--model", str(bench.model_folder)]
    command += [
        "--data",
        str(data),
        "--output",
        str(output),
        "--steps",
        "3",
        "--settings",
        "bf16:0.04:4",
        "--trl",
        "8 32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stderr[-500:])
    summary = json.loads(output.with_suffix(".json").read_text())["results"][0]["summary"]
    return {
        f"{phase}, {side}": figures[side] for phase, figures in summary.items() for side in ("ours", "trl", "ratio")
    }


for number in (32, 256):
    register_sampling("static", number, "generate with a static cache, compiled, bf16 weights", 120)

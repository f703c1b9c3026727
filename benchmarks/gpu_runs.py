"""Checks of ``gpu.py`` that start the trainer, and the figures of ``update.py``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Process
from pathlib import Path
from unittest import SkipTest
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from common import ROOT
from gpu_checks import Bench, forked

MISSING = [package for package in ("pydantic", "pyarrow") if importlib.util.find_spec(package) is None]
if not MISSING:
    import train_grpo
    from grpo.checkpoint.saver import Saver

# The number of different digits in a completion, from which random models get a gradient, too.
REWARD = "{name: tag_groups, args: {pattern: (0)|(1)|(2)|(3)|(4)|(5)|(6)|(7)|(8)|(9), max_value: 1.0}}"
VOLATILE = ("step_time", "tokens_per_second", "time/")


def start(bench: Bench, name: str, *settings: str, main: Callable | None = None, **environment: object) -> Process:
    """Start a short run of the small model in ``scratch/<name>``; ``main`` takes the place of ``train_grpo.main``."""
    if MISSING:
        raise SkipTest(f"no {MISSING[0]}")
    steps, P, T = (3, 2, 6) if bench.shape == "small" else (8, 8, 48)
    arguments = [
        f"--config={ROOT}/configs/tiny_arithmetic.yaml", f"model.name_or_path={bench.model_folder('small')}",
        f"output_dir={bench.scratch / name}", f"runtime.device={bench.device.type}", f"reward.functions=[{REWARD}]",
        f"rollout={{prompts_per_step: {P}, num_generations: 4, max_completion_length: {T}, temperature: 1.5}}",
        f"optim.max_steps={steps}", "runtime.precision=bf16", "runtime.deterministic=true",
        "runtime.try_largest_step=false", "runtime.threads_per_rank=1", "algorithm.beta=0.04",
        "checkpoint.save_steps=1", "checkpoint.keep=100",
        "eval.before_training=false", "data.max_eval_samples=1", "logging.log_completions=0", *settings,
    ]  # fmt: skip

    def run() -> None:
        os.environ.update({key: str(value) for key, value in environment.items()})
        sys.exit((main or train_grpo.main)(arguments))

    return forked(run, bench.scratch / f"{name}.txt")


def complete(run: Process, code: int = 0) -> str:
    """Wait for a run, expect that it ended with this exit code; its output."""
    run.join()
    text = Path(run.name).read_text(errors="replace")
    assert run.exitcode == code, f"{Path(run.name).stem}: exit code {run.exitcode}: {text[-300:]}"
    return text


def results(folder: Path) -> tuple[list[dict], dict[str, str]]:
    """The metrics of each step without times, and the digests of weights and optimizer at the end."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in line.items() if not key.startswith(VOLATILE)} for line in lines]
    files = json.loads((folder / f"checkpoint-{len(rows)}" / "manifest.json").read_text())["files"]
    return rows, {name: files[name]["sha256"] for name in ("model.safetensors", "trainer/states/__0_0.distcp")}


def same_as_whole(bench: Bench, name: str) -> dict:
    """Expect that the run ``name`` has the bits of one that is not interrupted, and without collectives."""
    text = complete(start(bench, f"{name}-whole"))
    assert "not captured" not in text, next(line for line in text.splitlines() if "not captured" in line)
    (rows, digests), (others, other_digests) = results(bench.scratch / f"{name}-whole"), results(bench.scratch / name)
    unequal = [row["step"] for row, other in zip(rows, others, strict=True) if row != other]
    assert not unequal, f"metrics differ at steps {unequal} of {len(rows)}"
    assert digests == other_digests, f"weights or optimizer differ: {other_digests} instead of {digests}"
    assert any(row.get("grad_norm", 0) > 0 for row in rows), "every gradient is 0: such a run shows nothing"
    return {"steps": len(rows)}


def kill_and_resume(bench: Bench) -> dict:
    """a tiny run under runtime.deterministic, ended by kill -9 and continued, has the bits of one that was not"""
    killed, folder = start(bench, "killed"), bench.scratch / "killed"
    while killed.is_alive() and not (folder / "checkpoint-1" / "manifest.json").exists():
        time.sleep(0.005)
    killed.kill()
    complete(killed, code=-9)
    saved = len(list(folder.glob("checkpoint-*")))
    complete(start(bench, "killed"))
    found = same_as_whole(bench, "killed") | {"checkpoints before the kill": saved}
    assert saved < found["steps"], "the run was complete when it was killed"
    return found


def large_run(bench: Bench, tokens_per_microbatch: int, fraction: float = 1.0, code: int = 0) -> str:
    """Two steps of the large model, which never ends a row, in a part of the memory; the output ends with the peaks."""

    def measured(arguments: list[str]) -> int:
        train, reset = train_grpo.train, torch.cuda.reset_peak_memory_stats

        def train_apart(run):
            rehearsed = torch.cuda.max_memory_allocated()
            reset()
            train(run)
            print("peaks", rehearsed, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

        torch.cuda.set_per_process_memory_fraction(fraction)
        without_saving = patch.object(Saver, "_on_writing_ranks", lambda *_: None)  # checkpoints are gigabytes here
        with without_saving, patch.object(train_grpo, "train", train_apart):
            return train_grpo.main(arguments)

    bench.need("cuda", "emulated")
    prompts, length = (4, 16) if bench.shape == "small" else (32, 256)
    return complete(start(
        bench, f"large-{tokens_per_microbatch}", f"model.name_or_path={bench.model_folder(bench.shape)}",
        f"rollout={{prompts_per_step: {prompts}, num_generations: 8, max_completion_length: {length}}}",
        "runtime.deterministic=false", "runtime.try_largest_step=true", "optim.max_steps=2",
        f"optim.tokens_per_microbatch={tokens_per_microbatch}", main=measured,
    ), code)  # fmt: skip


def dry_run_peak(bench: Bench) -> dict:
    """the try of the largest step at start needs at least as much as two real steps"""
    text = large_run(bench, 100 if bench.shape == "small" else 8192)
    rehearsed, real, reserved = (int(n) / 2**30 for n in re.search(r"^peaks (\d+) (\d+) (\d+)", text, re.M).groups())
    assert rehearsed >= real, f"rehearsed {rehearsed:.2f} GiB, real {real:.2f} GiB"
    return {"rehearsed GiB": rehearsed, "real GiB": real, "reserved GiB": reserved}


def too_large_microbatch(bench: Bench) -> dict:
    """a micro-batch that does not fit in a part of the memory is refused at start, with a value that fits"""
    fraction = 1e-4 if bench.shape == "small" else 0.35
    text = large_run(bench, 2**16, fraction, code=2)
    told = re.search(r"tokens_per_microbatch=65536 is too much .*; (\d+) fits", text)
    assert told and 0 < int(told[1]) < 2**16, text.splitlines()[-1]
    large_run(bench, int(told[1]), fraction)
    return {"refused": 2**16, "fits": int(told[1])}


def ranks(bench: Bench, name: str, backend: str, size: int, *settings: str, **environment: object) -> dict:
    """A run on so many ranks, as if each had a machine of its own; expects that they sum over ranks."""

    def counted(arguments: list[str]) -> int:
        init, all_reduce = dist.init_process_group, dist.all_reduce

        def begin(_, device_id=None, **options):
            init(backend, device_id=device_id if backend == "nccl" else None, **options)

        with patch.multiple(dist, init_process_group=begin, all_reduce=Mock(side_effect=all_reduce)):
            code = train_grpo.main(arguments)
            print("all-reduces:", dist.all_reduce.call_count)
        return code

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        environment |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=listening.getsockname()[1], WORLD_SIZE=size)
    settings = (*settings, f"output_dir={bench.scratch / name}")
    runs = [start(bench, f"{name}-{r}", *settings, main=counted, RANK=r, **environment) for r in range(size)]
    sums = [int(complete(run).rpartition("all-reduces: ")[2]) for run in runs]
    assert all(sums), f"a rank has not summed over ranks: {sums}"
    return {f"all-reduces by {backend}": sums[0]}


def nccl_alone(bench: Bench) -> dict:
    """one rank with NCCL and DDP, their shortcuts off, has the bits of a run without"""
    bench.need("cpu", "cuda")
    backend = "nccl" if bench.device.type == "cuda" else "gloo"
    return ranks(bench, "alone", backend, 1, GRPO_TEST_COLLECTIVES=1) | same_as_whole(bench, "alone")


def gloo_two_ranks(bench: Bench) -> dict:
    """two ranks on one GPU (gloo) take the first step of one rank: the same completions, loss and gradient to 1e-3"""
    bench.need("cpu", "cuda")
    settings = ("runtime.precision=fp32", "runtime.deterministic=false", "optim.max_steps=1")
    complete(start(bench, "one", *settings))
    calls = ranks(bench, "two", "gloo", 2, *settings)
    ((one,), _), ((two,), _) = (results(bench.scratch / name) for name in ("one", "two"))
    for name in ("reward", "completions/mean_length", "num_tokens", "loss", "kl", "grad_norm"):
        is_close = abs(one[name] - two[name]) <= 1e-3 * abs(one[name]) + 1e-6
        assert is_close, f"{name} is {two[name]} with two ranks, {one[name]} with one"
    return calls | {"grad_norm": two["grad_norm"]}


def update(bench: Bench) -> dict:
    """forward and backward: 64 completions of 128 to 512 tokens, 8 prompts of 256; utilisation of a matrix product"""
    bench.need("cuda")
    options = ["--device=cuda", "--prompts=8", "--points=8:256:512", "--repeats=1", "--threads=4"]
    command = [sys.executable, f"{ROOT}/benchmarks/update.py", f"--model={bench.model_folder(bench.shape)}", *options]
    done = subprocess.run([*command, f"--output={bench.scratch}/update"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    sides = json.loads((bench.scratch / "update.json").read_text())["rows"][0]["median"].items()
    return {f"{side}: {what}": value for side, values in sides for what, value in values.items()}

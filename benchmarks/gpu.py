"""Measures and checks a GPU in one call of at most nine minutes, figures first.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --list                               all names, with their criteria
    python benchmarks/gpu.py --only all --only kill_and_resume    some of them
    python benchmarks/gpu.py --device cpu --shape small           tries the command itself

It needs torch, transformers and numpy, and no network. Checks that start the trainer also need the
wheels of pydantic, pydantic-core, annotated-types, typing-inspection, cloudpickle and pyarrow;
TRL's step needs trl. Parts whose packages are missing are left out, and the results say so.

The model has the shape of Qwen2.5-0.5B and random weights. Each figure or check runs in a fork of
this process, which itself never uses the GPU, so that a crash or hang stops no other. Figures have
the machine for themselves; checks, which wait for the CPU, run beside each other. After each,
``benchmarks/results/gpu.md`` and ``gpu.json`` are written. The exit code is 0 only if every figure
and check passed; TRL's step does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import SkipTest

# Forks cannot use a GPU once their parent has initialised CUDA. With this variable PyTorch counts
# the GPUs without initialising it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import gpu_checks as checks
import gpu_step as figures
import torch
import transformers
from common import RESULTS, parser
from gpu_step import SIZES, Bench, forked

SECONDS = 530
"""Seconds of the whole command. A figure or check that has not ended by then is stopped."""
LIMIT_S = 240
"""Most seconds of a figure, and of all checks together."""

FIGURES = {
    "machine": (figures.machine,),
    "exact": (figures.exact,),
    # The other argument: whether with graphs.
    "plain": (figures.step, False),
    "all": (figures.step, True),
    "trl": (figures.trl,),
}
"""By name: a function, whose docstring is the criterion, and its arguments."""
CHECKS = {
    "kill_and_resume": (checks.kill_and_resume,),
    "nccl_alone": (checks.ranks, "nccl", 1),
    "gloo_two_ranks": (checks.ranks, "gloo", 2),
    "graphs_bf16": (checks.graphs, "bf16"),
    "graphs_fp32": (checks.graphs, "fp32"),
    "memory": (checks.memory,),
}
if torch.cuda.device_count() > 1:
    CHECKS["nccl_two_ranks"] = (checks.ranks, "nccl", 2)
JOBS = FIGURES | CHECKS


def run_here(name: str, bench: Bench) -> None:
    """Run a figure or check in this process, a fork, and write its result."""
    os.setsid()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{bench.scratch}/cache-{name}"
    function, *arguments = JOBS[name]
    begun = time.monotonic()
    found = {}
    try:
        found = function(bench, *arguments)
        wrong = found.pop("wrong", "")
        result = f"failed: {wrong}" if wrong else "passed"
    except SkipTest as reason:
        result = f"not run: {reason}"
    except BaseException:
        result = f"failed: {traceback.format_exc()}"
    row = {"result": result, "seconds": time.monotonic() - begun}
    (bench.scratch / f"{name}.json").write_text(json.dumps(row | found))
    os._exit(0)  # without waiting for processes that the function has left


def run_apart(names: list[str], bench: Bench, end: float) -> Iterator[dict]:
    """Run these side by side, each in a fork, and yield their results.

    Those that have not ended at the time ``end`` are stopped.
    """
    processes = []
    for name in names:
        run = partial(run_here, name, bench)
        log = bench.scratch / f"{name}.log"
        processes.append(forked(run, log))
    for name, process in zip(names, processes, strict=True):
        left = end - time.monotonic()
        process.join(max(left, 0))
        row = {
            "name": name,
            "result": f"failed: exit status {process.exitcode}",
        }
        if process.exitcode is None:
            row["result"] = "not run: not done in time"
        elif process.exitcode == 0:
            text = (bench.scratch / f"{name}.json").read_text()
            row |= json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        yield row


def write(rows: list[dict], path: Path) -> None:
    lines = [f"torch {torch.__version__}, transformers {transformers.__version__}", ""]
    for row in rows:
        words = [f"{key} {value}" for key, value in row.items()]
        lines.append("- " + ", ".join(words).replace("\n", " "))
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    path.with_suffix(".md").write_text("\n".join(lines))
    print(lines[-1], flush=True)


def main(argv: list[str]) -> int:
    end = time.monotonic() + SECONDS
    p = parser(__doc__)
    p.add_argument("--only", action="append", choices=JOBS)
    p.add_argument("--list", action="store_true")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("--shape", default="qwen2.5-0.5b", choices=SIZES)
    p.add_argument("--output", type=Path, default=RESULTS)
    a = p.parse_args(argv)
    if a.list:
        for name, (function, *_) in JOBS.items():
            print(f"{name}: {function.__doc__}")
        return 0
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        bench = Bench(torch.device(a.device), a.shape, Path(scratch))
        for batch in [*zip(FIGURES), CHECKS]:
            names = []
            for name in batch:
                if not a.only or name in ("machine", *a.only):
                    names.append(name)
            end_of_batch = min(time.monotonic() + LIMIT_S, end)
            for row in run_apart(names, bench, end_of_batch):
                rows.append(row)
                # A part of the results must not replace those of a whole call.
                write(rows, a.output / ("gpu_part" if a.only else "gpu"))
    return int(any(row["result"] != "passed" and row["name"] != "trl" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

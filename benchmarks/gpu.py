"""Measures and checks a GPU in one call of at most nine minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --list                               all names, with their criteria
    python benchmarks/gpu.py --only step --only kill_and_resume   some of them
    python benchmarks/gpu.py --device cpu --shape small           tries the command itself

It needs torch, transformers and numpy, and no network. Checks that start the trainer also need the
wheels of pydantic, pydantic-core, annotated-types, typing-inspection, cloudpickle and pyarrow:
without them they are not run.

The model has the shape of Qwen2.5-0.5B and random weights. Each part runs in a fork of this
process, which itself never uses the GPU, so that a crash or hang stops no other. After each,
``benchmarks/results/gpu.md`` and ``gpu.json`` are written. The exit code is 0 only if all passed.
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
from gpu_step import Bench, forked
from random_model import SIZES

SECONDS = 530
"""Seconds of the whole command. A part that has not ended by then is stopped."""
LIMIT_S = 240
"""Most seconds of a part."""

JOBS = {
    "machine": figures.machine,
    "exact": figures.exact,
    "step": figures.step,
    "graphs_bf16": partial(checks.graphs, "bf16"),
    "graphs_fp32": partial(checks.graphs, "fp32"),
    "kill_and_resume": checks.kill_and_resume,
    "nccl": checks.nccl,
}
"""By name: a function, whose docstring is the criterion."""


def run_here(name: str, bench: Bench) -> None:
    """Run a part in this process, a fork, and write its result."""
    os.setsid()
    begun = time.monotonic()
    found = {}
    try:
        found = JOBS[name](bench=bench)
        wrong = found.pop("wrong", "")
        result = f"failed: {wrong}" if wrong else "passed"
    except SkipTest as reason:
        result = f"not run: {reason}"
    except BaseException:
        result = f"failed: {traceback.format_exc()}"
    row = {"result": result, "seconds": time.monotonic() - begun}
    (bench.scratch / f"{name}.json").write_text(json.dumps(row | found))
    os._exit(0)  # without waiting for processes that the function has left


def run_apart(name: str, bench: Bench, end: float) -> dict:
    """Run a part in a fork, which is stopped at the time ``end``; its result."""
    process = forked(partial(run_here, name, bench), bench.scratch / f"{name}.log")
    process.join(max(end - time.monotonic(), 0))
    row = {"name": name, "result": f"failed: exit status {process.exitcode}"}
    if process.exitcode is None:
        row["result"] = "not run: not done in time"
    elif process.exitcode == 0:
        text = (bench.scratch / f"{name}.json").read_text()
        # Four digits are more than a measurement has.
        row |= json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return row


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
        for name, function in JOBS.items():
            print(f"{name}: {getattr(function, 'func', function).__doc__}")
        return 0

    # A part of the results must not replace those of a whole call.
    path = a.output / ("gpu_part" if a.only else "gpu")
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        bench = Bench(torch.device(a.device), a.shape, Path(scratch))
        for name in JOBS:
            if not a.only or name in ("machine", *a.only):
                rows.append(run_apart(name, bench, min(time.monotonic() + LIMIT_S, end)))
                write(rows, path)
    return int(any(row["result"] != "passed" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

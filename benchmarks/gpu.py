"""Checks that everything works on this machine's GPU, then measures it, in three groups of at most nine minutes each.

    python benchmarks/gpu.py --group first                kernels and the model's checks, then every figure
    python benchmarks/gpu.py --group runs                 runs of the trainer: kill and continue, memory, NCCL
    python benchmarks/gpu.py --group rest                 CUDA graphs
    python benchmarks/gpu.py --list                       all names, with the criterion of each check
    python benchmarks/gpu.py --only scoring --only sdpa   some of them; the results go to gpu_part.md and gpu_part.json

It needs torch, transformers and numpy, and no network: the model has Qwen2.5-0.5B's shape and random weights. Checks
that start the trainer are not run without pydantic and pyarrow. Each check runs in a fork of this process, which itself
never uses the GPU: a crash or hang stops no other. Results are written after each. The exit code is 0 if every check
passed, and 1 otherwise, also if one could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import SkipTest

# With it PyTorch asks the driver's library for GPUs without initialising CUDA, after which a fork could not use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import gpu_checks as checks
import gpu_runs as runs
import torch
import transformers
from common import RESULTS
from gpu_checks import SIZES, Bench, forked

from grpo.system import write_atomically

FIGURES = [runs.update, *checks.FIGURES]
GROUPS = {
    "first": [
        checks.versions,
        checks.model_checks,
        checks.tf32_checks,
        checks.sdpa,
        checks.scoring,
        checks.fast_paths,
        *FIGURES,
    ],
    "runs": [runs.kill_and_resume, runs.dry_run_peak, runs.too_large_microbatch, runs.nccl_alone, runs.gloo_two_ranks],
    "rest": [*checks.GRAPHS, checks.failed_capture],
}
"""AssertionError: a check has failed; SkipTest: it cannot be run here. The docstring is its criterion."""
LIMIT_S = 150
"""A check or figure is stopped, and has failed, after this time."""


def run_apart(function: Callable[[Bench], dict], bench: Bench, limit_s: float) -> dict:
    """Run a check or figure in a fork, for at most so many seconds; all processes that it started end with it."""
    answer, log = (bench.scratch / f"{function.__name__}{suffix}" for suffix in (".json", ".log"))

    def run() -> None:
        os.setsid()
        try:
            result = {"result": "passed", "found": function(bench)}
        except SkipTest as reason:
            result = {"result": "not run", "why": str(reason)}
        except BaseException as error:
            traceback.print_exc()
            result = {"result": "failed", "why": f"{type(error).__name__}: {error}"}
        answer.write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # without waiting for processes that the check has left

    process = forked(run, log)
    process.join(limit_s)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    why = f"stopped after {limit_s:.3g} s" if code is None else f"its process ended with status {code}"
    result = json.loads(answer.read_text()) if code == 0 else {"result": "failed", "why": why}
    if result["result"] == "failed":
        result["output"] = log.read_text(errors="replace").splitlines()[-30:]
    return result


def write(results: dict, path: Path) -> None:
    """The results as JSON, and as a table."""
    lines = [f"{results['date']}, `python benchmarks/gpu.py {results['arguments']}`, {results['versions']}", ""]
    lines += ["| name | result | s | criterion, or what is measured | found |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        result = row["result"] if row["result"] == "passed" else f"**{row['result']}**"
        words = row["words"].replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {row['name']} | {result} | {row['seconds']:.0f} | {row['about']} | {words} |")
    write_atomically(path.with_suffix(".json"), json.dumps(results, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), "\n".join(lines) + "\n")


def main(argv: list[str]) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {function.__name__: function for group in GROUPS.values() for function in group}
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="may be given several times")
    parser.add_argument("--group", choices=GROUPS, help="these checks and figures")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-figures", action="store_true")
    parser.add_argument("--seconds", type=float, help="nothing goes on after it; default: 540 for a group, else 1800")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this command itself")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SIZES, help="of the model")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    a = parser.parse_args(argv)
    a.seconds = a.seconds or (540 if a.group else 1800)
    chosen = [names[name] for name in a.only or names]
    chosen = [x for x in chosen if x in GROUPS.get(a.group, chosen) and not (a.no_figures and x in FIGURES)]
    if a.list:
        print("\n".join(f"{function.__name__:24}{function.__doc__}" for function in chosen))
        return 0
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}"
    results = {"date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions, "arguments": " ".join(argv), "rows": []}
    path = a.output / ("gpu_part" if a.only else f"gpu_{a.group}" if a.group else "gpu")
    a.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        device = torch.device(a.device, 0) if a.device == "cuda" else torch.device("cpu")
        bench = Bench(device, a.shape, Path(scratch))
        for function in chosen:
            begun, is_figure = time.monotonic(), function in FIGURES
            row = {"name": function.__name__, "about": function.__doc__, "is_figure": is_figure}
            if (left := a.seconds - (begun - started)) < 1:
                row |= {"result": "not run", "why": f"the {a.seconds:g} s of --seconds are used up"}
            else:
                row |= run_apart(function, bench, min(LIMIT_S, left))
            row["seconds"] = round(time.monotonic() - begun, 1)
            values = [(key, f"{x:.4g}" if isinstance(x, float) else x) for key, x in row.get("found", {}).items()]
            row["words"] = row.get("why") or ", ".join(f"{key} {value}" for key, value in values)
            results["rows"].append(row)
            write(results, path)
            print(f"{row['result']:8}{row['name']:24}{row['seconds']:6.1f} s  {row['words']}", flush=True)
    passed = [row["result"] == "passed" for row in results["rows"] if not row["is_figure"]]
    print(f"{sum(passed)} of {len(passed)} checks passed; results in {path}.md")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

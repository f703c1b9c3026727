"""Checks that everything works on this machine's GPU, then measures it, in three groups of at most nine minutes each.

    python benchmarks/gpu.py --group first                kernels and the model's checks, then every figure
    python benchmarks/gpu.py --group runs                 runs of the trainer: kill and continue, memory, NCCL
    python benchmarks/gpu.py --group rest                 CUDA graphs
    python benchmarks/gpu.py --seconds 3600               all of them
    python benchmarks/gpu.py --list                       their names, and the criterion of each check
    python benchmarks/gpu.py --only scoring --only sdpa   some of them; the results go to gpu_part.md and gpu_part.json

It needs torch, transformers and numpy, and no network: the model has Qwen2.5-0.5B's shape and random weights. Checks that start the trainer also
need pydantic; without it they are listed as not run. Every check and figure runs in a fork of this process, which itself never uses the GPU,
so one that crashes, hangs or spoils the device stops no other. The results are written after each. The exit code is 0 if every
check passed, and 1 otherwise, also if one could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

# With it PyTorch asks the driver's library for GPUs without initialising CUDA, after which a fork could not use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))

# These fill CHECKS and FIGURES, in this order.
import gpu_checks  # noqa: F401, I001
import gpu_graphs  # noqa: F401
import gpu_runs
import gpu_ranks  # noqa: F401
import gpu_figures  # noqa: F401
from gpu_common import CHECKS, FIGURES, ROOT, Bench, Entry, NotRun

GROUPS = {"first": {"gpu_checks", "gpu_figures"}, "runs": {"gpu_runs", "gpu_ranks"}, "rest": {"gpu_graphs"}}
"""The files of the checks and figures of each group."""


def outcome(entry: Entry, bench: Bench) -> dict:
    """Run an entry in this process."""
    try:
        if getattr(torch._C, "_cuda_isInBadFork", bool)():
            raise RuntimeError(
                "an import used CUDA before the fork, which therefore cannot: find it and keep it from that"
            )
        return {"result": "passed", "found": entry.function(bench)}
    except NotRun as reason:
        return {"result": "not run", "why": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return {"result": "failed", "why": f"{kind}{str(error).strip() or 'without a message'}"}


def run_apart(entry: Entry, bench: Bench, limit_s: float) -> dict:
    """Run an entry in a fork, for at most so many seconds; all processes that it started end with it."""
    answer, log = bench.scratch / f"{entry.name}.json", bench.scratch / f"{entry.name}.log"
    started = time.monotonic()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            answer.write_text(json.dumps(outcome(entry, bench)))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() - started < limit_s:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        result = {"result": "failed", "why": f"stopped after {limit_s:.2g} s"}
    elif answer.exists():
        result = json.loads(answer.read_text())
    else:
        result = {"result": "failed", "why": f"its process ended with status {os.waitstatus_to_exitcode(status)}"}
    if result["result"] == "failed":
        result["output"] = log.read_text(errors="replace").splitlines()[-30:] if log.exists() else []
    return {"name": entry.name, "about": entry.about, "seconds": round(time.monotonic() - started, 1)} | result


def shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(results: dict, folder: Path, name: str) -> None:
    """The JSON file, and the same as tables; each replaced at once, so that a reader or an abort never meets half a file."""
    lines = [f"{results['date']}, `{results['command']}`, {results['versions']}", ""]
    for title, criterion in (("checks", "criterion"), ("figures", "measured")):
        lines += [
            f"## {title.capitalize()}",
            "",
            f"| name | result | s | {criterion} | found |",
            "|---|---|---|---|---|",
        ]
        for row in results[title]:
            found = row.get("why") or ", ".join(f"{key} {shown(value)}" for key, value in row["found"].items())
            result = row["result"] if row["result"] == "passed" else f"**{row['result']}**"
            found = found.replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {row['name']} | {result} | {row['seconds']:.0f} | {row['about']} | {found} |")
        lines.append("")
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(results, indent=1) + "\n"), (".md", "\n".join(lines))):
        unfinished = folder / f".{name}{suffix}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / f"{name}{suffix}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this check or figure; may be given several times"
    )
    parser.add_argument("--group", choices=GROUPS, help="these checks and figures")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-figures", action="store_true")
    parser.add_argument("--seconds", type=float, default=540, help="nothing starts, or goes on, after this time")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this command itself")
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of the model; `small` has two layers of width 64")
    parser.add_argument("--scratch", help="folder that keeps the random model between calls; default: a new one")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"), help="folder of the results")
    a = parser.parse_args(argv)
    if a.list:
        print("\n".join(f"{entry.name:24}{entry.about}" for entry in [*CHECKS, *FIGURES]))
        return 0
    names = [entry.name for entry in [*CHECKS, *FIGURES]]
    if unknown := [name for name in a.only or [] if name not in names]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(names)}")
    started = time.monotonic()
    results = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": " ".join(["python benchmarks/gpu.py", *argv]),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}",
        "checks": [],
        "figures": [],
    }
    name = "gpu_part" if a.only else f"gpu_{a.group}" if a.group else "gpu"
    with contextlib.nullcontext(a.scratch) if a.scratch else tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        Path(scratch).mkdir(parents=True, exist_ok=True)
        bench = Bench(torch.device(a.device, 0) if a.device == "cuda" else torch.device("cpu"), a.shape, Path(scratch))
        builder = gpu_runs.start_building(bench)
        for title, entries in (("checks", CHECKS), ("figures", [] if a.no_figures else FIGURES)):
            for entry in entries:
                if (a.only and entry.name not in a.only) or (
                    a.group and entry.function.__module__ not in GROUPS[a.group]
                ):
                    continue
                if (left := a.seconds - (time.monotonic() - started)) < 1:
                    row = {"name": entry.name, "about": entry.about, "seconds": 0.0}
                    row |= {"result": "not run", "why": f"the {a.seconds:g} s of --seconds are used up"}
                else:
                    row = run_apart(entry, bench, min(entry.limit_s, left))
                results[title].append(row)
                results["seconds"] = round(time.monotonic() - started, 1)
                write(results, Path(a.output), name)
                found = row.get("why") or ", ".join(f"{key} {shown(value)}" for key, value in row["found"].items())
                print(f"{row['result']:8}{row['name']:24}{row['seconds']:6.1f} s  {found}", flush=True)
        if builder:
            os.kill(builder, signal.SIGKILL)
    passed = sum(row["result"] == "passed" for row in results["checks"])
    print(f"{passed} of {len(results['checks'])} checks passed; results in {a.output}/{name}.md")
    return int(passed < len(results["checks"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

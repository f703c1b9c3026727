"""Weak scaling over gloo ranks of one thread each: the same number of problems per rank, 1 and 2 ranks (or more), in turn.

    python benchmarks/scaling.py --model DIR --data train.jsonl
    python benchmarks/scaling.py --paper         simulates the completion lengths of docs/scaling.md

Efficiency is the time of a step on one rank divided by that on several ranks, each with ``--prompts`` problems per rank, summed over all steps
after the first. Ranks wait for the rank with the longest completions, so the figure also depends on the sampled lengths. The cores of one machine
share memory bandwidth and clock, so the script also compares with independent runs of one rank at the same time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def seconds_per_step(a, ranks: int) -> tuple[float, float]:
    """Seconds per 100 tokens of mean completion length: of the step, and of the update (with its all-reduce) on the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [
            str(ROOT / "train_grpo.py"),
            "--config",
            str(ROOT / "configs" / "gsm8k_cpu.yaml"),
            f"model.name_or_path={a.model}",
            f"data.dataset={a.data}",
            f"output_dir={folder}/run",
            f"rollout.prompts_per_step={a.prompts * ranks}",
            f"optim.max_steps={a.steps}",
            "eval.before_training=false",
            "eval.max_samples=2",
            "runtime.threads_per_rank=1",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    tokens = sum(line["completions/mean_length"] for line in lines) / 100
    return sum(line["step_time"] for line in lines) / tokens, sum(line["time/update"] for line in lines) / tokens


def seconds_apart(a) -> tuple[float, float]:
    """Means over independent runs of one rank at the same time."""
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda _: seconds_per_step(a, 1), range(a.ranks)))
    return tuple(statistics.mean(values) for values in zip(*found, strict=True))


def paper() -> None:
    """Print the longest completion and the load of the busiest rank, for 64 completions a rank of log-normal length (median 200, sigma 0.5, at most 1,024)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for ranks in (1, 8, 64, 512):
        lengths = (torch.randn(400, ranks, 64, generator=generator) * 0.5).exp().mul(200).clamp(max=1024)
        tokens = lengths.sum(dim=2)
        busiest = (tokens.max(dim=1).values / tokens.mean(dim=1)).mean()
        print(
            f"{ranks} ranks: longest {lengths.amax(dim=(1, 2)).mean():.0f}, busiest rank {busiest:.2f} times the mean"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4, help="problems per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output")
    a = parser.parse_args()
    if a.paper:
        paper()
        return
    rounds, sides = (
        [],
        {
            "1": lambda: seconds_per_step(a, 1),
            str(a.ranks): lambda: seconds_per_step(a, a.ranks),
            "apart": lambda: seconds_apart(a),
        },
    )
    for number in range(a.repeats):
        rounds.append({name: sides[name]() for name in (sides if number % 2 == 0 else reversed(sides))})
        print(json.dumps(rounds[-1]), flush=True)
    efficiency = {name: [one[name][0] / one[str(a.ranks)][0] for one in rounds] for name in ("1", "apart")}
    for name, what in (("1", "one rank alone"), ("apart", f"{a.ranks} independent runs of one rank")):
        print(
            f"{a.ranks} ranks of one thread, {a.prompts} problems each, beside {what}: efficiency of the whole step "
            f"{statistics.median(efficiency[name]):.2f} ({min(efficiency[name]):.2f} to {max(efficiency[name]):.2f})"
        )
    if a.output:
        given = {name: value for name, value in vars(a).items() if name not in ("model", "data", "output")}
        result = {"rounds": rounds, "efficiency": efficiency, "arguments": given, "date": time.strftime("%Y-%m-%d")}
        Path(a.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

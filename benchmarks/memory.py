"""Resident memory of the trainer by step, in bf16 and fp32, with one rank and with two: does it grow?

    python benchmarks/memory.py --model DIR --data train.jsonl
    python benchmarks/memory.py --model DIR --data train.jsonl --settings "bf16:1" --steps 30 rollout.max_completion_length=64

A run of configs/gsm8k_cpu.yaml with 4 problems of about 242 prompt tokens x 8 completions and beta 0.04; ``key=value`` changes it. RSS is
read at the end of every update, on the rank that has most. Two threads in all.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from compare_trl import processor
from step_side import SYSTEM

WORKER = "--worker"  # the first argument of a process that trains


def worker(folder: str, arguments: list[str]) -> None:
    """One rank of the trainer, which writes its RSS in MiB after every update to ``folder/RANK``."""
    import train_grpo

    path, apply_update = Path(folder) / os.environ.get("RANK", "0"), train_grpo.apply_update

    def measured(run, metrics) -> None:
        apply_update(run, metrics)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with open(path, "a") as file:
            file.write(f"{pages * resource.getpagesize() / 2**20:.1f} {peak:.1f}\n")

    train_grpo.apply_update = measured
    sys.exit(train_grpo.main(arguments))


def measure(a, precision: str, ranks: int) -> dict:
    """RSS in MiB and seconds by step; the peak of the whole run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [
            __file__,
            WORKER,
            folder,
            f"--config={ROOT}/configs/gsm8k_cpu.yaml",
            f"output_dir={folder}/run",
            f"model.name_or_path={a.model}",
            f"data.dataset={a.data}",
            "data.train_split=train",
            "data.eval_split=null",
            f"data.system_prompt={json.dumps(SYSTEM)}",
            "rollout.prompts_per_step=4",
            "algorithm.beta=0.04",
            f"optim.max_steps={a.steps}",
            "optim.tokens_per_microbatch=4096",
            "eval.before_training=false",
            f"runtime.precision={precision}",
            f"runtime.threads_per_rank={max(a.threads // ranks, 1)}",
            *a.changes,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        of_ranks = [
            [tuple(map(float, line.split())) for line in (Path(folder) / str(rank)).read_text().splitlines()]
            for rank in range(ranks)
        ]
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_time"] for line in lines if "step_time" in line]
    return {
        "rss_mib": [max(rss for rss, _ in of_step) for of_step in zip(*of_ranks, strict=True)],
        "peak_mib": max(peak for steps in of_ranks for _, peak in steps),
        "seconds": seconds,
        "completion_tokens": [line["completions/mean_length"] for line in lines if "step_time" in line],
    }


def figures(found: dict) -> dict:
    """RSS of step 5 (of the first one in a shorter run) and of the last one, and what the first step takes beside the median."""
    rss, seconds = found["rss_mib"], found["seconds"]
    early = rss[min(4, len(rss) - 1)]
    return {
        "step_1": rss[0],
        "step_5": early,
        "last": rss[-1],
        "growth": rss[-1] / early,
        "peak": found["peak_mib"],
        "first_step_s": seconds[0],
        "median_step_s": statistics.median(seconds),
        "first_to_median": seconds[0] / statistics.median(seconds),
    }


def table(results: list[dict]) -> str:
    lines = [
        "| precision | ranks | steps | RSS at step 1, MiB | step 5 | last | last / step 5 | peak | first step, s | median step, s | times |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        f = one["figures"]
        lines.append(
            f"| {one['precision']} | {one['ranks']} | {len(one['rss_mib'])} | {f['step_1']:.0f} | {f['step_5']:.0f} | {f['last']:.0f} "
            f"| {f['growth']:.3f} | {f['peak']:.0f} | {f['first_step_s']:.2f} | {f['median_step_s']:.2f} | {f['first_to_median']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--data", required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--settings", default="bf16:1 bf16:2 fp32:1 fp32:2", help="precision:ranks ...")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--output", help="output files, without suffix")
    parser.add_argument("changes", nargs="*", help="key=value")
    a = parser.parse_args()
    results = []
    for setting in a.settings.split():
        precision, ranks = setting.split(":")
        found = measure(a, precision, int(ranks))
        results.append({"precision": precision, "ranks": int(ranks), "figures": figures(found), **found})
        print(setting, "RSS by step, MiB:", *(f"{rss:.0f}" for rss in found["rss_mib"]), flush=True)
    print(table(results))
    if a.output:
        given = {name: value for name, value in vars(a).items() if name not in ("model", "data", "output")}
        about = {"date": time.strftime("%Y-%m-%d"), "machine": processor(), "arguments": given}
        Path(a.output + ".json").write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
        text = f"{about['date']}, {about['machine']}, `benchmarks/memory.py` with {json.dumps(given)}\n\n"
        Path(a.output + ".md").write_text(text + table(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        main()

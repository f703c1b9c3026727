"""Resident memory of the trainer by step, in bf16 and fp32, with one rank and with two: does it grow?

    python benchmarks/memory.py --model DIR --data train.jsonl
    python benchmarks/memory.py --model DIR --data train.jsonl --settings "bf16:1" --steps 30 optim.max_grad_norm=0.5

A run of configs/gsm8k_cpu.yaml with 4 problems of about 242 prompt tokens x 8 completions and beta 0.04; ``key=value``
changes it. RSS is read at the end of every update, on the rank that has most. Two threads in all.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path

from common import ROOT, about, parser, train, write
from step_side import SYSTEM

FILES = "GRPO_MEMORY_FOLDER"
"""Environment variable of a process that trains: the folder where each rank writes its RSS."""


def worker() -> None:
    """One rank of the trainer, which writes its RSS in MiB after every update to a file of its rank."""
    import train_grpo

    path = Path(os.environ[FILES]) / os.environ.get("RANK", "0")
    apply_update = train_grpo.apply_update

    def measured(run, metrics) -> None:
        apply_update(run, metrics)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with open(path, "a") as file:
            file.write(f"{pages * resource.getpagesize() / 2**20:.1f} {peak:.1f}\n")

    train_grpo.apply_update = measured
    sys.exit(train_grpo.main(sys.argv[1:]))


def measure(a, precision: str, ranks: int) -> dict:
    """RSS in MiB and seconds by step; the peak of the whole run."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FILES] = folder
        lines = train(
            Path(folder) / "run",
            f"--config={ROOT}/configs/gsm8k_cpu.yaml",
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
            ranks=ranks,
            script=Path(__file__),
        )
        del os.environ[FILES]
        texts = [(Path(folder) / str(rank)).read_text() for rank in range(ranks)]
    of_ranks = [[tuple(map(float, line.split())) for line in text.splitlines()] for text in texts]
    steps = [line for line in lines if "step_time" in line]
    return {
        "rss_mib": [max(rss for rss, _ in of_step) for of_step in zip(*of_ranks, strict=True)],
        "peak_mib": max(peak for steps in of_ranks for _, peak in steps),
        "seconds": [line["step_time"] for line in steps],
        "completion_tokens": [line["completions/mean_length"] for line in steps],
    }


def figures(found: dict) -> dict:
    """RSS of step 5 (of the last one in a shorter run) and of the last one; the first step's time and the median."""
    rss = found["rss_mib"]
    seconds = found["seconds"]
    early = rss[min(4, len(rss) - 1)]
    median = statistics.median(seconds)
    memory = {"step_1": rss[0], "step_5": early, "last": rss[-1], "growth": rss[-1] / early, "peak": found["peak_mib"]}
    return memory | {"first_step_s": seconds[0], "median_step_s": median, "first_to_median": seconds[0] / median}


def table(results: list[dict]) -> str:
    columns = ["precision", "ranks", "steps", "RSS at step 1, MiB", "step 5", "last", "last / step 5", "peak"]
    columns += ["first step, s", "median step, s", "times"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in results:
        digits = (0, 0, 0, 3, 0, 2, 2, 2)
        values = [f"{x:.{n}f}" for x, n in zip(one["figures"].values(), digits, strict=True)]
        lines.append(f"| {one['precision']} | {one['ranks']} | {len(one['rss_mib'])} | {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    p = parser(
        __doc__,
        model=None,
        data=None,
        settings="bf16:1 bf16:2 fp32:1 fp32:2",
        steps=100,
        threads=2,
        output=None,
    )
    p.add_argument("changes", nargs="*")
    a = p.parse_args()
    results = []
    for setting in a.settings.split():
        precision, ranks = setting.split(":")
        found = measure(a, precision, int(ranks))
        results.append({"precision": precision, "ranks": int(ranks), "figures": figures(found), **found})
        print(setting, "RSS by step, MiB:", *(f"{rss:.0f}" for rss in found["rss_mib"]), flush=True)
    print(table(results))
    if a.output:
        arguments = {name: value for name, value in vars(a).items() if name not in ("model", "data", "output")}
        write(a.output, about(arguments=arguments, results=results), table(results))


if __name__ == "__main__":
    if FILES in os.environ:
        worker()
    else:
        main()

"""Weak scaling over gloo ranks of one thread: the same number of problems per rank, 1 and 2 ranks
(or more), in turn.

    python benchmarks/scaling.py --model DIR --data train.jsonl

Efficiency is the time of a step on one rank divided by that on several ranks, each with
``--prompts`` problems, summed over all steps after the first. Ranks wait for the rank with the
longest completions, so the figure also depends on the sampled lengths. The cores of one machine
share memory bandwidth and clock, so the script also compares with independent runs of one rank at
the same time."""

import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, about, in_turn, parser, ratios, shown, train, write


def seconds_per_step(a, ranks: int) -> float:
    """Seconds per 100 tokens of mean completion length."""
    with tempfile.TemporaryDirectory() as folder:
        lines = train(
            Path(folder, "run"),
            f"--config={ROOT}/configs/gsm8k_cpu.yaml",
            f"model.name_or_path={a.model}",
            f"data.dataset={a.data}",
            f"rollout.prompts_per_step={a.prompts * ranks}",
            f"optim.max_steps={a.steps}",
            "eval.before_training=false",
            "eval.max_samples=2",
            "runtime.threads_per_rank=1",
            ranks=ranks,
        )[1:]
    tokens = sum(line["completions/mean_length"] for line in lines) / 100
    return sum(line["step_time"] for line in lines) / tokens


def seconds_apart(a) -> float:
    """Mean over independent runs of one rank at the same time."""
    with ThreadPoolExecutor() as threads:
        found = threads.map(seconds_per_step, [a] * a.ranks, [1] * a.ranks)
        return statistics.mean(found)


def main() -> None:
    a = parser(
        __doc__,
        model=None,
        data=None,
        ranks=2,
        prompts=4,
        steps=5,
        repeats=3,
        output=None,
    ).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sides = {
        "one rank alone": lambda: seconds_per_step(a, 1),
        "several": lambda: seconds_per_step(a, a.ranks),
        "independent runs": lambda: seconds_apart(a),
    }
    seconds = {name: [] for name in sides}
    for number in range(a.repeats):
        for name in in_turn(sides, number):
            seconds[name].append(sides[name]())
            print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    several = seconds["several"]
    print(
        f"{a.ranks} ranks of one thread, {a.prompts} problems each, "
        "efficiency of the whole step beside"
    )
    for name in ("one rank alone", "independent runs"):
        print(f"{name}: {shown(ratios(seconds[name], several))}")
    write(a.output, about(a, seconds=seconds))


if __name__ == "__main__":
    main()

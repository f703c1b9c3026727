"""Weak scaling over gloo ranks of one thread: the same number of problems per rank, 1 and 2 ranks (or more), in turn.

    python benchmarks/scaling.py --model DIR --data train.jsonl
    python benchmarks/scaling.py --paper         simulates the completion lengths of docs/scaling.md

Efficiency is the time of a step on one rank divided by that on several ranks, each with ``--prompts`` problems,
summed over all steps after the first. Ranks wait for the rank with the longest completions, so the figure also depends
on the sampled lengths. The cores of one machine share memory bandwidth and clock, so the script also compares with
independent runs of one rank at the same time.
"""

import json
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, about, in_turn, parser, ratios, train


def seconds_per_step(a, ranks: int) -> tuple[float, float]:
    """Seconds per 100 tokens of mean completion length: of the step, and of its update on the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        lines = train(
            Path(folder) / "run",
            "--config",
            f"{ROOT}/configs/gsm8k_cpu.yaml",
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
    return sum(line["step_time"] for line in lines) / tokens, sum(line["time/update"] for line in lines) / tokens


def seconds_apart(a) -> tuple[float, float]:
    """Means over independent runs of one rank at the same time."""
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda _: seconds_per_step(a, 1), range(a.ranks)))
    return tuple(statistics.mean(values) for values in zip(*found, strict=True))


def paper() -> None:
    """Print the longest completion and the load of the busiest rank.

    Each rank has 64 completions of log-normal length (median 200, sigma 0.5, at most 1,024).
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    for ranks in (1, 8, 64, 512):
        lengths = (torch.randn(400, ranks, 64, generator=generator) * 0.5).exp().mul(200).clamp(max=1024)
        tokens = lengths.sum(dim=2)
        longest = lengths.amax(dim=(1, 2)).mean()
        busiest = (tokens.max(dim=1).values / tokens.mean(dim=1)).mean()
        print(f"{ranks} ranks: longest {longest:.0f}, busiest rank {busiest:.2f} times the mean")


def main() -> None:
    a = parser(
        __doc__,
        model=None,
        data=None,
        paper=False,
        ranks=2,
        prompts=4,
        steps=5,
        repeats=3,
        output=None,
    ).parse_args()
    if a.paper:
        paper()
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    many = str(a.ranks)
    rounds = []
    sides = {
        "1": lambda: seconds_per_step(a, 1),
        many: lambda: seconds_per_step(a, a.ranks),
        "apart": lambda: seconds_apart(a),
    }
    for number in range(a.repeats):
        rounds.append({name: sides[name]() for name in in_turn(sides, number)})
        print(json.dumps(rounds[-1]), flush=True)
    efficiency = {}
    for name, what in (("1", "one rank alone"), ("apart", f"{a.ranks} independent runs of one rank")):
        found = efficiency[name] = ratios([one[name][0] for one in rounds], [one[many][0] for one in rounds])
        print(
            f"{a.ranks} ranks of one thread, {a.prompts} problems each, beside {what}: efficiency of the whole step "
            f"{found['ratio']:.2f} ({found['least']:.2f} to {found['greatest']:.2f})"
        )
    if a.output:
        arguments = {name: value for name, value in vars(a).items() if name not in ("model", "data", "output")}
        result = about(rounds=rounds, efficiency=efficiency, arguments=arguments)
        Path(a.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

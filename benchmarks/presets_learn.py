"""Learning of every preset of docs/algorithm.md on a tiny task (arithmetic): same initial model, same steps, several seeds.

    python benchmarks/presets_learn.py                        12 presets x 3 seeds x 100 steps
    python benchmarks/presets_learn.py --steps 3 --seeds 0    a quick check
    python benchmarks/presets_learn.py --config configs/tiny_countdown.yaml --output benchmarks/results/presets_learn_countdown.json

Each preset runs with its own values (`algorithm={name: ...}`). Everything else comes from configs/tiny_arithmetic.yaml: 8 problems x 8
completions, learning rate 2e-4 falling linearly to 0. All runs start from the same cached model; the seed decides the order of the
problems and the samples. Each result is written to benchmarks/results/presets_learn.json at once (a stored run is not repeated), and from
there to presets_learn.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grpo.config

PRESETS = tuple(grpo.config.PRESETS)
MEASURED = ("eval/greedy_accuracy", "eval/mean@8", "eval/pass@8", "eval/format")


def run(preset: str, seed: int, steps: int, folder: Path, before: dict | None, config: Path) -> dict:
    """One training run in its own process. Returns its evaluations and its accuracy by step.

    Args:
        before: the evaluation before training, if another run of this seed has it: it does not depend on the preset.
    """
    output = folder / f"{preset}-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    command = [
        sys.executable, str(ROOT / "train_grpo.py"), "--config", str(config),
        f"algorithm={{name: {preset}}}", f"seed={seed}", f"optim.max_steps={steps}", f"output_dir={output}",
        f"eval.before_training={before is None}",
        "runtime.threads_per_rank=1", "runtime.device=cpu", "logging.every=1000", "logging.log_completions=0",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"] > 0]
    last = trained[-10:]
    accuracy = next(name for name in ("rewards/accuracy/mean", "rewards/countdown/mean") if name in last[0])
    shutil.rmtree(output)
    return {
        "preset": preset,
        "seed": seed,
        "steps": steps,
        "before": before or {name: lines[0][name] for name in MEASURED},
        "after": {name: trained[-1][name] for name in MEASURED},
        "accuracy_of_last_10_steps": statistics.mean(line[accuracy] for line in last),
        "accuracy_by_step": [round(line[accuracy], 4) for line in trained],
        "seconds_per_step": statistics.median(line["step_time"] for line in trained),
    }


def table(runs: list[dict]) -> str:
    """Markdown, in percent: mean, standard deviation (n-1) and range over seeds."""
    rows = [
        "| preset | seeds | mean@8 after | s.d. | lowest to highest | greedy after | format after |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset in [p for p in PRESETS if any(r["preset"] == p for r in runs)]:
        mine = [r for r in runs if r["preset"] == preset]
        after = {name: [100 * r["after"][name] for r in mine] for name in MEASURED}
        samples = after["eval/mean@8"]
        rows.append(
            f"| {preset} | {len(mine)} | {statistics.mean(samples):.1f} | {_deviation(samples)} | "
            f"{min(samples):.1f} to {max(samples):.1f} | "
            f"{statistics.mean(after['eval/greedy_accuracy']):.1f} | {statistics.mean(after['eval/format']):.1f} |"
        )
    before = {r["seed"]: r["before"] for r in runs}.values()
    start = {name: statistics.mean(100 * b[name] for b in before) for name in MEASURED}
    rows.append(
        f"| before training | {len(before)} | {start['eval/mean@8']:.1f} | "
        f"{_deviation([100 * b['eval/mean@8'] for b in before])} | | {start['eval/greedy_accuracy']:.1f} | "
        f"{start['eval/format']:.1f} |"
    )
    return "\n".join(rows) + "\n"


def _deviation(values: list[float]) -> str:
    return f"{statistics.stdev(values):.1f}" if len(values) > 1 else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/tiny_arithmetic.yaml")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/presets_learn.json")
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "runs/presets_learn",
        help="folder of the runs, which are deleted at their end",
    )
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(options.output.read_text()) if options.output.exists() else []
    for seed in options.seeds:
        for preset in options.presets:
            if any((r["preset"], r["seed"], r["steps"]) == (preset, seed, options.steps) for r in runs):
                continue
            before = next((r["before"] for r in runs if r["seed"] == seed), None)
            runs.append(run(preset, seed, options.steps, options.runs, before, options.config.absolute()))
            options.output.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
            print(
                f"{preset:20} seed {seed}: mean@8 {runs[-1]['before']['eval/mean@8']:.1%} -> {runs[-1]['after']['eval/mean@8']:.1%}",
                flush=True,
            )
    same_length = [r for r in runs if r["steps"] == options.steps]
    text = table(same_length)
    options.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

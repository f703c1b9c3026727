"""Learning of every preset of docs/algorithm.md on arithmetic: same initial model, same steps, several seeds.

    python benchmarks/presets_learn.py                        12 presets x 3 seeds x 100 steps
    python benchmarks/presets_learn.py --config configs/tiny_countdown.yaml \
        --output benchmarks/results/presets_learn_countdown.json

Each preset runs with its own values (`algorithm={name: ...}`). Everything else comes from configs/tiny_arithmetic.yaml:
8 problems x 8 completions, learning rate 2e-4 falling linearly to 0. All runs start from the same cached model; a seed
decides the order of the problems and the samples. Each result is written to benchmarks/results/presets_learn.json at
once (a stored run is not repeated), and from there to presets_learn.md.
"""

import shutil
import statistics
from pathlib import Path

from common import RESULTS, ROOT, parser, read_runs, train, write_runs

import grpo.config

PRESETS = tuple(grpo.config.PRESETS)
MEASURED = ("eval/greedy_accuracy", "eval/mean@8", "eval/pass@8", "eval/format")


def run(preset: str, seed: int, steps: int, folder: Path, config: Path) -> dict:
    """One training run: its evaluations and its accuracy by step."""
    output = folder / f"{preset}-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    lines = train(
        output,
        "--config",
        str(config),
        f"algorithm={{name: {preset}}}",
        f"seed={seed}",
        f"optim.max_steps={steps}",
        "runtime.threads_per_rank=1",
        "runtime.device=cpu",
    )
    shutil.rmtree(output)
    trained = [line for line in lines if line["step"] > 0]
    accuracy = next(name for name in ("rewards/accuracy/mean", "rewards/countdown/mean") if name in trained[0])
    return {
        "preset": preset,
        "seed": seed,
        "steps": steps,
        "before": {name: lines[0][name] for name in MEASURED},
        "after": {name: trained[-1][name] for name in MEASURED},
        "accuracy_of_last_10_steps": statistics.mean(line[accuracy] for line in trained[-10:]),
        "accuracy_by_step": [round(line[accuracy], 4) for line in trained],
        "seconds_per_step": statistics.median(line["step_time"] for line in trained),
    }


def table(runs: list[dict]) -> str:
    """Markdown, in percent: mean, standard deviation (n-1) and range over seeds."""
    rows = [
        "| preset | seeds | mean@8 after | s.d. | lowest to highest | greedy after | format after |",
        "|---|---|---|---|---|---|---|",
    ]

    def add(label: str, evaluations: list[dict], *, with_range: bool = True) -> None:
        found = {name: [100 * evaluation[name] for evaluation in evaluations] for name in MEASURED}
        samples = found["eval/mean@8"]
        means = {name: statistics.mean(values) for name, values in found.items()}
        deviation = f"{statistics.stdev(samples):.1f}" if len(samples) > 1 else "-"
        spread = f"{min(samples):.1f} to {max(samples):.1f} " if with_range else ""
        rows.append(
            f"| {label} | {len(samples)} | {means['eval/mean@8']:.1f} | {deviation} | {spread}| "
            f"{means['eval/greedy_accuracy']:.1f} | {means['eval/format']:.1f} |"
        )

    for preset in [p for p in PRESETS if any(r["preset"] == p for r in runs)]:
        add(preset, [r["after"] for r in runs if r["preset"] == preset])
    add("before training", list({r["seed"]: r["before"] for r in runs}.values()), with_range=False)
    return "\n".join(rows) + "\n"


def main() -> None:
    options = parser(
        __doc__,
        config=ROOT / "configs/tiny_arithmetic.yaml",
        steps=100,
        seeds=[0, 1, 2],
        presets=list(PRESETS),
        output=RESULTS / "presets_learn.json",
        runs=ROOT / "runs/presets_learn",
    ).parse_args()
    runs = read_runs(options.output)
    for seed in options.seeds:
        for preset in options.presets:
            if any((r["preset"], r["seed"], r["steps"]) == (preset, seed, options.steps) for r in runs):
                continue
            runs.append(run(preset, seed, options.steps, options.runs, options.config.absolute()))
            write_runs(options.output, runs)
            first, last = (runs[-1][when]["eval/mean@8"] for when in ("before", "after"))
            print(f"{preset:20} seed {seed}: mean@8 {first:.1%} -> {last:.1%}", flush=True)
    text = table([r for r in runs if r["steps"] == options.steps])
    options.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

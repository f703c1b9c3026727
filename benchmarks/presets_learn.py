"""Learning of every preset of docs/algorithm.md on arithmetic: same initial model, same steps,
several seeds.

    python benchmarks/presets_learn.py                        12 presets x 3 seeds x 100 steps
    python benchmarks/presets_learn.py --config configs/tiny_countdown.yaml \
        --output benchmarks/results/presets_learn_countdown.json

Each preset runs with its own values (`algorithm={name: ...}`). Everything else comes from
configs/tiny_arithmetic.yaml: 8 problems x 8 completions, learning rate 2e-4 falling linearly to 0.
All runs start from the same cached model; a seed decides the order of the problems and the samples.
Each result is written to benchmarks/results/presets_learn.json at once (a stored run is not
repeated), and from there to presets_learn.md. """

import shutil
import statistics
from pathlib import Path

from common import RESULTS, ROOT, markdown, parser, read_runs, train, write_runs

from grpo.config import PRESETS

MEASURED = ("eval/greedy_accuracy", "eval/mean@8", "eval/format")


def run(preset: str, seed: int, steps: int, config: Path) -> dict:
    """The evaluations of one training run, before and after."""
    output = ROOT / f"runs/presets_learn/{preset}-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    lines = train(
        output,
        f"--config={config.absolute()}",
        f"algorithm={{name: {preset}}}",
        f"seed={seed}",
        f"optim.max_steps={steps}",
        "runtime.threads_per_rank=1",
        "runtime.device=cpu",
    )
    shutil.rmtree(output)
    return {
        "preset": preset,
        "seed": seed,
        "steps": steps,
        "before": {name: lines[0][name] for name in MEASURED},
        "after": {name: lines[-1][name] for name in MEASURED},
    }


def table(runs: list[dict]) -> str:
    """In percent: mean, standard deviation (n-1) and range over seeds."""
    rows = []

    def add(label: str, evaluations: list[dict], *, with_range: bool = True) -> None:
        greedy, samples, formats = [
            [100 * evaluation[name] for evaluation in evaluations] for name in MEASURED
        ]
        deviation = f"{statistics.stdev(samples):.1f}" if len(samples) > 1 else "-"
        spread = f"{min(samples):.1f} to {max(samples):.1f}" if with_range else ""
        mean, greedy_mean, format_mean = [
            f"{statistics.mean(values):.1f}" for values in (samples, greedy, formats)
        ]
        rows.append([label, len(samples), mean, deviation, spread, greedy_mean, format_mean])

    for preset in PRESETS:
        if found := [entry["after"] for entry in runs if entry["preset"] == preset]:
            add(preset, found)
    untrained = {entry["seed"]: entry["before"] for entry in runs}
    add("before training", list(untrained.values()), with_range=False)
    columns = [
        "preset",
        "seeds",
        "mean@8 after",
        "s.d.",
        "lowest to highest",
        "greedy after",
        "format after",
    ]
    return markdown(columns, rows)


def main() -> None:
    options = parser(
        __doc__,
        config=ROOT / "configs/tiny_arithmetic.yaml",
        steps=100,
        seeds=[0, 1, 2],
        presets=list(PRESETS),
        output=RESULTS / "presets_learn.json",
    ).parse_args()
    runs = read_runs(options.output)
    stored = {(entry["preset"], entry["seed"], entry["steps"]) for entry in runs}
    for seed in options.seeds:
        for preset in options.presets:
            if (preset, seed, options.steps) in stored:
                continue
            runs.append(run(preset, seed, options.steps, options.config))
            write_runs(options.output, runs)
            print(f"{preset:20} seed {seed}: {runs[-1]}", flush=True)
    text = table([entry for entry in runs if entry["steps"] == options.steps])
    options.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

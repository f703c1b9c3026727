"""Held-out accuracy by number of sampled completions: this trainer and TRL 1.16.0, same initial model, same problems.

    python -m venv .venv-trl && .venv-trl/bin/pip install -r requirements.txt -e ".[bench]"
    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python       3 seeds each, then table and plot
    python benchmarks/learning_vs_trl.py --plot-only                             table and plot of the stored results (matplotlib)

Settings of both: builtin:tiny, builtin:arithmetic in the order of our schedule, 8 problems x 8 completions a step, 64 tokens, temperature 1,
rewards accuracy + 0.5 format, clip 0.2, beta 0, rewards scaled by the group's std, loss averaged over responses, AdamW 2e-4 falling linearly to 0,
gradient norm 1, fp32, one CPU thread. Settings that differ from TRL's defaults (in brackets): loss_type grpo (dapo), bf16 False (True where
supported), gradient_checkpointing False (True), steps_per_generation 1, shuffle_dataset False, adamw_torch (fused). The same code evaluates both on
the same held-out problems: 4 samples each at temperature 1, and greedily.
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
SIDES = {"ours": "this trainer", "trl": "TRL 1.16.0"}
METRIC, GREEDY = "eval/mean@4", "eval/greedy_accuracy"
COMPLETIONS_PER_STEP = 64


def settings(seed: int, steps: int) -> list[str]:
    return [
        "--config", str(ROOT / "configs/tiny_arithmetic.yaml"), f"seed={seed}", f"optim.max_steps={steps}",
        "data.max_eval_samples=256", "eval.num_samples=4", "eval.temperature=1.0", "runtime.threads_per_rank=1",
        "runtime.device=cpu", "runtime.precision=fp32",
    ]  # fmt: skip


def run_ours(seed: int, steps: int, every: int, folder: Path) -> dict:
    output = folder / f"ours-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, str(ROOT / "train_grpo.py"), *settings(seed, steps)]
    command += [f"output_dir={output}", f"eval.every={every}", "logging.every=1000", "logging.log_completions=0"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(output)
    return {
        "points": [{k: v for k, v in x.items() if k == "step" or k.startswith("eval/")} for x in lines if METRIC in x],
        "reward_by_step": [round(x["reward"], 4) for x in lines if x["step"]],
        "seconds": sum(x["step_time"] for x in lines if x["step"]),
    }


def run_trl(seed: int, steps: int, every: int, folder: Path, python: Path) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"trl-{seed}.json"
    command = [str(python), str(ROOT / "benchmarks/trl_side.py"), str(output), str(every), *settings(seed, steps)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(output.read_text())
    output.unlink()
    return found


def table(runs: list[dict]) -> str:
    """Markdown: accuracy of sampled completions by completions sampled so far, mean and range over seeds."""
    steps = [point["step"] for point in runs[0]["points"]]
    rows = ["| completions sampled | " + " | ".join(SIDES.values()) + " |", "|---|---|---|"]
    for step in steps:
        cells = []
        for side in SIDES:
            values = _values(runs, side, step, METRIC)
            cells.append(f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else "-")
        rows.append(f"| {step * COMPLETIONS_PER_STEP} | {' | '.join(cells)} |")
    last = [_values(runs, side, steps[-1], GREEDY) for side in SIDES]
    cells = [f"{statistics.mean(v):.1f} ({min(v):.1f} to {max(v):.1f})" if v else "-" for v in last]
    rows.append(f"| greedy, at the end | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _values(runs: list[dict], side: str, step: int, metric: str) -> list[float]:
    return [100 * p[metric] for r in runs if r["side"] == side for p in r["points"] if p["step"] == step]


def plot(runs: list[dict], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed (pip install -e '.[plots]'): the plot is not updated")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for side, label in SIDES.items():
        steps = [point["step"] for r in runs if r["side"] == side for point in r["points"]]
        steps = sorted(set(steps))
        values = [_values(runs, side, step, METRIC) for step in steps]
        x = [step * COMPLETIONS_PER_STEP for step in steps]
        (line,) = axes.plot(x, [statistics.mean(v) for v in values], marker="o", markersize=3, label=label)
        axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=line.get_color(), alpha=0.2)
    axes.set_xlabel("completions sampled")
    axes.set_ylabel("held-out accuracy of a sample, %")
    axes.set_title(f"builtin:arithmetic, mean and range of {len({r['seed'] for r in runs})} seeds", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help='Python of an environment with TRL (the extra "bench")')
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="evaluate every N steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/learning_vs_trl.json")
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "runs/learning_vs_trl",
        help="folder of the runs, which are deleted at their end",
    )
    parser.add_argument("--plot-only", action="store_true")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(options.output.read_text()) if options.output.exists() else []
    if not options.plot_only and options.trl_python is None:
        parser.error("--trl-python: name the Python of an environment with TRL")
    for seed in options.seeds if not options.plot_only else []:
        for side in SIDES:
            if any((r["side"], r["seed"], r["steps"]) == (side, seed, options.steps) for r in runs):
                continue
            arguments = (seed, options.steps, options.every, options.runs)
            found = run_ours(*arguments) if side == "ours" else run_trl(*arguments, options.trl_python.absolute())
            runs.append({"side": side, "seed": seed, "steps": options.steps, **found})
            options.output.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
            print(f"{side:5} seed {seed}: {' '.join(f'{p[METRIC]:.3f}' for p in found['points'])}", flush=True)
    shown = [r for r in runs if r["steps"] == options.steps]
    if shown:
        text = table(shown)
        options.output.with_suffix(".md").write_text(text)
        plot(shown, options.output.with_suffix(".png"))
        print(text)


if __name__ == "__main__":
    main()

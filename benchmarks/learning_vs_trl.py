"""Held-out accuracy by number of sampled completions: this trainer and TRL 1.16.0, same initial model, same problems.

    python -m venv .venv-trl && .venv-trl/bin/pip install -r requirements.txt -e ".[bench]"
    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python       3 seeds each, then table and plot
    python benchmarks/learning_vs_trl.py --plot-only                             table and plot of the stored results (matplotlib)
    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python --config X.yaml --seeds 0 [section.key=value ...]
                                                                                 any configuration that TRL can run as well

Settings of both: builtin:tiny, builtin:arithmetic in the order of our schedule, 8 problems x 8 completions a step, 64 tokens, temperature 1,
rewards accuracy + 0.5 format, clip 0.2, beta 0, rewards scaled by the group's std, loss averaged over responses, AdamW 2e-4 falling linearly to 0,
gradient norm 1, fp32, one CPU thread. Settings that differ from TRL's defaults (in brackets): loss_type grpo (dapo), bf16 False (True where
supported), gradient_checkpointing False (True), steps_per_generation 1, shuffle_dataset False, adamw_torch (fused). The same code evaluates both on
the same held-out problems: 4 samples each at temperature 1, and greedily.

With --config all of these come from that file, also device and precision; the table then has the mean of each reward before and after, too, and results go to
the folder of --runs. A setting that TRL lacks (several updates per rollout, a stop string, ...) stops the script with its name.
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

from grpo.config import Config, ConfigError, load_config

SIDES = {"ours": "this trainer", "trl": "TRL 1.16.0"}
GREEDY = "eval/greedy_accuracy"
DEFAULT = [
    "--config", str(ROOT / "configs/tiny_arithmetic.yaml"), "optim.max_steps=100", "data.max_eval_samples=256",
    "eval.num_samples=4", "eval.temperature=1.0", "runtime.threads_per_rank=1", "runtime.device=cpu", "runtime.precision=fp32",
]  # fmt: skip
"""The settings without --config."""


def sampled_metric(config: Config) -> str:
    """The evaluation metric of the table: the mean over samples, or the greedy one without samples."""
    return f"eval/mean@{config.eval.num_sampled}" if config.eval.num_sampled else GREEDY


def run_ours(settings: list[str], seed: int, every: int, folder: Path) -> dict:
    output = folder / f"ours-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, str(ROOT / "train_grpo.py"), *settings, f"seed={seed}"]
    command += [f"output_dir={output}", f"eval.every={every}", "logging.every=1000", "logging.log_completions=0"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(output)
    return {
        "points": [{k: v for k, v in x.items() if k == "step" or k.startswith("eval/")} for x in lines if GREEDY in x],
        "reward_by_step": [round(x["reward"], 4) for x in lines if x["step"]],
        "seconds": sum(x["step_time"] for x in lines if x["step"]),
    }


def run_trl(settings: list[str], seed: int, every: int, folder: Path, python: Path) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"trl-{seed}.json"
    command = [str(python), str(ROOT / "benchmarks/trl_side.py"), str(output), str(every), *settings, f"seed={seed}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(output.read_text())
    output.unlink()
    return found


def table(runs: list[dict], config: Config, *, with_rewards: bool) -> str:
    """Markdown: accuracy of sampled completions by completions sampled so far, mean and range over seeds.

    ``with_rewards`` adds the mean of each reward before and after.
    """
    steps, metric = [point["step"] for point in runs[0]["points"]], sampled_metric(config)
    per_step = config.rollout.prompts_per_step * config.rollout.num_generations
    rows = ["| completions sampled | " + " | ".join(SIDES.values()) + " |", "|---|---|---|"]
    rows += [_row(str(step * per_step), runs, step, metric, 100, 1) for step in steps]
    rows.append(_row("greedy, at the end", runs, steps[-1], GREEDY, 100, 1))
    names = [name for name in runs[0]["points"][0] if name.startswith("eval/rewards/")] if with_rewards else []
    for name in names:
        for step, when in ((0, "before"), (steps[-1], "after")):
            rows.append(_row(f"reward {name.removeprefix('eval/rewards/')}, {when}", runs, step, name, 1, 4))
    return "\n".join(rows) + "\n"


def _row(label: str, runs: list[dict], step: int, metric: str, factor: float, digits: int) -> str:
    cells = []
    for side in SIDES:
        found = _values(runs, side, step, metric, factor)
        texts = [f"{value:.{digits}f}" for value in (statistics.mean(found), min(found), max(found))] if found else []
        spread = f" ({texts[1]} to {texts[2]})" if len(found) > 1 else ""
        cells.append(texts[0] + spread if found else "-")
    return f"| {label} | {' | '.join(cells)} |"


def _values(runs: list[dict], side: str, step: int, metric: str, factor: float = 100) -> list[float]:
    return [factor * p[metric] for r in runs if r["side"] == side for p in r["points"] if p["step"] == step]


def plot(runs: list[dict], config: Config, path: Path) -> None:
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
        values = [_values(runs, side, step, sampled_metric(config)) for step in steps]
        x = [step * config.rollout.prompts_per_step * config.rollout.num_generations for step in steps]
        (line,) = axes.plot(x, [statistics.mean(v) for v in values], marker="o", markersize=3, label=label)
        axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=line.get_color(), alpha=0.2)
    axes.set_xlabel("completions sampled")
    axes.set_ylabel("held-out accuracy of a sample, %")
    axes.set_title(f"{config.data.dataset}, mean and range of {len({r['seed'] for r in runs})} seeds", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help='Python of an environment with TRL (the extra "bench")')
    parser.add_argument("--config", type=Path, help="a configuration; default: the settings above")
    parser.add_argument("--steps", type=int, help="default: 100, or as many as the configuration has")
    parser.add_argument("--every", type=int, help="evaluate every N steps; default: 20; with --config before and after")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/learning_vs_trl.json, or in --runs")
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "runs/learning_vs_trl",
        help="folder of the runs, which are deleted at their end",
    )
    parser.add_argument("--plot-only", action="store_true")
    options, overrides = parser.parse_known_args()
    settings = ["--config", str(options.config.absolute()), *overrides] if options.config else [*DEFAULT, *overrides]
    if options.steps is not None:
        settings.append(f"optim.max_steps={options.steps}")
    try:
        config = load_config(settings)
    except ConfigError as error:
        parser.error(str(error))
    steps = config.optim.max_steps
    if steps is None:
        parser.error("--steps: the configuration has no optim.max_steps")
    is_own = options.config is not None or bool(overrides)
    default = options.runs / f"{options.config.stem if options.config else 'changed'}.json"
    output = options.output or (default if is_own else ROOT / "benchmarks/results/learning_vs_trl.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(output.read_text()) if output.exists() else []
    if not options.plot_only and options.trl_python is None:
        parser.error("--trl-python: name the Python of an environment with TRL")
    every = options.every or (steps if is_own else 20)
    for seed in options.seeds if not options.plot_only else []:
        for side in SIDES:
            if any(
                (r["side"], r["seed"], r["steps"], r.get("settings", settings)) == (side, seed, steps, settings)
                for r in runs
            ):
                continue
            arguments = (settings, seed, every, options.runs)
            found = run_ours(*arguments) if side == "ours" else run_trl(*arguments, options.trl_python.absolute())
            of_config = {"settings": settings} if is_own else {}
            runs.append({"side": side, "seed": seed, "steps": steps, **of_config, **found})
            output.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
            print(
                f"{side:5} seed {seed}: {' '.join(f'{p[sampled_metric(config)]:.3f}' for p in found['points'])}",
                flush=True,
            )
    shown = [r for r in runs if r["steps"] == steps and r.get("settings", settings) == settings]
    if shown:
        text = table(shown, config, with_rewards=is_own)
        output.with_suffix(".md").write_text(text)
        plot(shown, config, output.with_suffix(".png"))
        print(text)


if __name__ == "__main__":
    main()

"""The results of a sweep: per variant and metric the mean over seeds, as Markdown and JSON, and as a picture."""

import importlib.util
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas

from grpo.evaluation.intervals import LEVEL, student
from grpo.report.read import RunData
from grpo.system import write_atomically
from grpo.telemetry.console import is_rate

Spreads = dict[str, dict[str, dict[str, Any]]]
"""Variant -> metric -> ``{mean, sd, low, high, values by seed}``."""
LAST_STEPS = 10
TRAINING = {
    "reward": ("reward", LAST_STEPS, statistics.fmean),
    "completions/mean_length": ("length, tokens", LAST_STEPS, statistics.fmean),
    "entropy": ("entropy, nats", LAST_STEPS, statistics.fmean),
    "kl": ("KL, nats", LAST_STEPS, statistics.fmean),
    "grad_norm": ("gradient norm", 0, statistics.fmean),
    "clip_ratio/region_mean": ("clipped tokens, %", 0, statistics.fmean),
    "step_time": ("seconds per step", 0, statistics.median),
}
"""Metric of training -> title, number of steps at the end (0: all) and their average.

Those of the last steps describe the policy that was reached. A falling learning rate makes the others small at the end.
"""
CAPTION = f"mean ± s.d. [{LEVEL:.0%} interval of the mean], over the seeds"
INTERVAL = "Student's t over seeds, n - 1 degrees of freedom"
FOOTNOTE = f"""The s.d. has n - 1 in its denominator. The interval ({INTERVAL}), mean ± t s.d. / √n,
covers the difference between seeds, and is not cut at 0% or 100%. Evaluation: after the last step. Reward,
completion length, entropy and KL: mean of the last {LAST_STEPS} steps, or of all if there are fewer.
Gradient norm and clipped tokens: mean of all steps. Seconds per step: median of all steps.
"""


def write_results(output: Path, found: dict[str, dict[int, RunData]], metric: str | None, command: str | None) -> None:
    """Write and print the table, and draw the picture of ``metric``; ``found``: variant -> seed -> complete run."""
    numbers = {variant: {seed: measure(run) for seed, run in runs.items()} for variant, runs in found.items()}
    if before := before_training(found):
        numbers = {"before training": before} | numbers
    spread = {variant: spreads(runs) for variant, runs in numbers.items()}
    variants = [{"variant": v, "seeds": list(numbers[v]), "metrics": spread[v]} for v in numbers]
    content = {"command": command, "interval": {"level": LEVEL, "method": INTERVAL}, "variants": variants}
    write_atomically(output / "sweep.json", json.dumps(content, indent=1) + "\n")
    table, files = as_markdown(spread), "sweep.md, sweep.json"
    write_atomically(output / "sweep.md", (f"```bash\n{command}\n```\n\n" if command else "") + table)
    print(table)
    if importlib.util.find_spec("matplotlib"):
        draw(found, metric or main_metric(spread), output / "sweep.png")
        files += ", sweep.png"
    print(f"written   {output}: {files}", flush=True)


def measure(run: RunData) -> dict[str, float]:
    """The numbers of one run by the names of its metrics: the last evaluation, and the averages of ``TRAINING``."""
    steps = [line for line in run.metrics if line["step"] > 0]
    numbers = next(filter(None, map(_evaluation, reversed(steps))), {})
    for name, (_, last, average) in TRAINING.items():
        if values := [line[name] for line in steps[-last:] if line.get(name) is not None]:
            numbers[name] = average(values)
    return numbers


def _evaluation(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith("eval/") and value is not None}


def before_training(found: dict[str, dict[int, RunData]]) -> dict[int, dict[str, float]]:
    """Seed -> metric -> value of the evaluation of step 0; empty if variants differ in it."""
    first = [(seed, _evaluation(run.metrics[0])) for runs in found.values() for seed, run in runs.items()
             if run.metrics[0]["step"] == 0]  # fmt: skip
    by_seed = dict(first)
    return by_seed if all(by_seed[seed] == numbers for seed, numbers in first) else {}


def main_metric(spread: Spreads) -> str | None:
    """The evaluation metric that a sweep is judged by first: the mean over samples, else the greedy accuracy."""
    names = sorted({name for metrics in spread.values() for name in metrics}, reverse=True)
    return next((name for name in names if name.startswith(("eval/mean@", "eval/greedy_accuracy"))), None)


def spreads(runs: dict[int, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Metric -> mean, s.d., interval and values over the seeds that have the metric; no s.d. of a single value."""
    found = {}
    for name in dict.fromkeys(name for numbers in runs.values() for name in numbers):
        values = {seed: numbers[name] for seed, numbers in runs.items() if name in numbers}
        several = list(values.values()) if len(values) > 1 else None
        low, high = student(several) if several else (None, None)
        sd = statistics.stdev(several) if several else None
        found[name] = dict(mean=statistics.fmean(values.values()), sd=sd, low=low, high=high, values=values)
    return found


def as_markdown(spread: Spreads) -> str:
    """The table in two parts: results, and the behaviour of training."""
    names = dict.fromkeys(name for metrics in spread.values() for name in metrics)
    means = [name for name in names if name.startswith("eval/mean@")]
    results = [name for name in ("eval/greedy_accuracy", *means, "eval/format", "reward") if name in names]
    training = [name for name in TRAINING if name in names and name != "reward"]
    lines = [CAPTION, ""]
    for columns in filter(None, (results, training)):
        rows = [["variant", "seeds", *map(_title, columns)]]
        for variant, metrics in spread.items():
            if not metrics.keys().isdisjoint(columns):
                num_seeds = max(len(one["values"]) for one in metrics.values())
                cells = [_cell(metrics[name], name) if name in metrics else "-" for name in columns]
                rows.append([variant.replace("|", "\\|"), str(num_seeds), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        lines += [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows] + [""]
    return "\n".join([*lines, FOOTNOTE])


def _title(name: str) -> str:
    if name in TRAINING:
        return TRAINING[name][0]
    return name.removeprefix("eval/").replace("_", " ") + ", %" * is_rate(name)


def _cell(spread: dict[str, Any], name: str) -> str:
    """Three digits of the mean or of the s.d., whichever is larger, and at least one decimal of percentages."""
    scale = 100 if _title(name).endswith("%") else 1
    largest = scale * max(abs(spread["mean"]), spread["sd"] or 0.0)
    decimals = min(max(2 - math.floor(math.log10(largest)), 0), 5) if largest else 0
    decimals = max(decimals, int(scale == 100))
    shown = [f"{scale * spread[key]:.{decimals}f}" for key in ("mean", "sd", "low", "high") if spread[key] is not None]
    return "{} ± {} [{}, {}]".format(*shown) if len(shown) == 4 else shown[0]


def curve(
    runs: Sequence[RunData],
    name: str,
) -> pandas.DataFrame:
    """Mean and s.d. over the runs by step; NaN, which leaves a gap, where a run did not compute it.

    In training these are of a metric's moving means over a twentieth of the steps.
    """
    series = []
    for run in runs:
        lines = [line for line in run.metrics if name in line]
        table = pandas.DataFrame(lines, columns=["step", name], dtype=float)
        series.append(table.set_index("step"))
    table = pandas.concat(series, axis=1, join="inner")
    window = 1 if name.startswith("eval/") else max(len(table) // 20, 1)
    means = table.rolling(window, min_periods=1).mean()
    shown = means.where(table.notna())[window - 1 :]
    return pandas.DataFrame(
        {
            "mean": shown.mean(axis=1, skipna=False),
            "sd": shown.std(axis=1).fillna(0.0),
        }
    )


def draw(found: dict[str, dict[int, RunData]], metric: str | None, path: Path) -> None:
    """Write the picture: the reward and a metric by step, one colour per variant, with a band over the seeds."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for name in ("reward", metric) if name)
    figure = Figure(figsize=(5.5 * len(names), max(4.0, 0.25 * len(found) + 1)), layout="constrained")
    colors = colormaps["tab10" if len(found) <= 10 else "tab20"].colors
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        curves = {variant: curve(list(runs.values()), name) for variant, runs in found.items()}
        for i, (variant, points) in enumerate(curves.items()):
            marker = "o" if len(points) < 8 else None
            axes.plot(points.index, points["mean"], color=colors[i % len(colors)], label=variant, marker=marker)
            low, high = points["mean"] - points["sd"], points["mean"] + points["sd"]
            axes.fill_between(points.index, low, high, color=colors[i % len(colors)], alpha=0.12, linewidth=0)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.suptitle(
        "mean over seeds, band: ± s.d.; reward: moving mean over a twentieth of the steps", fontsize="small"
    )
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))

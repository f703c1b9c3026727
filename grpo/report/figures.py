"""The main curves as PNG files for a paper. Needs matplotlib (``pip install -e ".[plots]"``)."""

from collections.abc import Sequence
from pathlib import Path

from grpo.report.read import RunData, before_and_after
from grpo.system import import_extra

CURVES = {
    "reward": "reward",
    "kl": "KL to the reference (nats per token)",
    "entropy": "entropy (nats per token)",
    "completions/mean_length": "completion length (tokens)",
    "completions/clipped_ratio": "truncated completions",
    "clip_ratio/region_mean": "clipped tokens",
    "frac_reward_zero_std": "groups with equal rewards",
    "eval/greedy_accuracy": "greedy accuracy",
}


def write_figures(runs: Sequence[RunData], folder: str | Path) -> list[Path]:
    """Write one PNG per curve, with all runs, and one of the accuracies before and after; returns the paths."""
    import_extra("matplotlib", "plots", needed_by="--figures").use("Agg")
    from matplotlib import pyplot

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for run in runs for line in run.metrics for name in line)
    parts = {name: name for name in names if name.startswith("rewards/") and name.endswith("/mean")}
    written = []
    for metric, label in (CURVES | parts).items():
        lines = [[(x["step"], x[metric]) for x in run.metrics if x.get(metric) is not None] for run in runs]
        if not any(lines):
            continue
        figure, axes = pyplot.subplots(figsize=(4.5, 3), layout="constrained")
        marker = "o" if metric.startswith("eval/") else None
        for i, (run, points) in enumerate(zip(runs, lines, strict=True)):
            if points:  # a run has one colour in all figures
                axes.plot(*zip(*points, strict=True), label=run.name, color=f"C{i}", marker=marker)
        axes.set(xlabel="step", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if len(runs) > 1:
            axes.legend(frameon=False)
        written.append(folder / (metric.replace("/", "_") + ".png"))
        figure.savefig(written[-1], dpi=200)
        pyplot.close(figure)
    path = _comparison(runs, folder, pyplot)
    return written + [path] * (path is not None)


def _comparison(runs: Sequence[RunData], folder: Path, pyplot) -> Path | None:
    rows = [(run.name, row) for run in runs for row in before_and_after(run) if row["name"] == "eval/greedy_accuracy"]
    bars = [(f"{name}\n{when}", row[when]) for name, row in rows for when in ("before", "after") if row[when]]
    if not bars:
        return None
    figure, axes = pyplot.subplots(figsize=(max(3.0, 1.1 * len(bars)), 3), layout="constrained")
    values = [side["value"] for _, side in bars]
    axes.bar(range(len(bars)), values, color=["#999999" if name.endswith("before") else "#0072b2" for name, _ in bars])
    if all(side["low"] is not None for _, side in bars):
        reach = [[s["value"] - s["low"] for _, s in bars], [s["high"] - s["value"] for _, s in bars]]
        axes.errorbar(range(len(bars)), values, yerr=reach, fmt="none", ecolor="black", capsize=4)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set(ylabel="greedy accuracy", ylim=(0, 1))
    path = folder / "before_after.png"
    figure.savefig(path, dpi=200)
    pyplot.close(figure)
    return path

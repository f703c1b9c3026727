"""The main curves as PNG files for a paper. Needs matplotlib (``pip install -e ".[plots]"``)."""

from collections.abc import Sequence
from pathlib import Path

from grpo.report.read import RunData
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
    """Write one PNG per curve, with all runs; returns the paths."""
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
    return written

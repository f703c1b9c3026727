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


def write_figures(
    runs: Sequence[RunData],
    folder: str | Path,
) -> list[Path]:
    """Write one PNG per curve, with all runs; returns the paths."""
    import_extra("matplotlib", "plots", needed_by="--figures").use("Agg")
    from matplotlib import pyplot

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for run in runs for line in run.metrics for name in line)
    parts = {name: name for name in names if name.startswith("rewards/") and name.endswith("/mean")}

    written = []
    for metric, label in (CURVES | parts).items():
        curves = [curve(run, metric) for run in runs]
        if not any(curves):
            continue
        figure, axes = pyplot.subplots(
            figsize=(4.5, 3),
            layout="constrained",
        )
        for i, points in enumerate(curves):
            if points:
                axes.plot(
                    points.keys(),
                    points.values(),
                    label=runs[i].name,
                    color=f"C{i}",  # a run has one colour in all figures
                    marker="o",
                    # 1.5 is the width of the line, so that only a value between two gaps is a dot.
                    markersize=6 if metric.startswith("eval/") else 1.5,
                )
        axes.set(
            xlabel="step",
            ylabel=label,
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if len(runs) > 1:
            axes.legend(frameon=False)
        written.append(folder / (metric.replace("/", "_") + ".png"))
        figure.savefig(written[-1], dpi=200)
        pyplot.close(figure)
    return written


def curve(
    run: RunData,
    metric: str,
) -> dict[int, float | None]:
    """Step -> value; None, which leaves a gap, where a step lacks it; empty if no step has it."""
    values = {line["step"]: line[metric] for line in run.metrics if metric in line}
    is_empty = set(values.values()) == {None}
    return {} if is_empty else values

"""The picture of a sweep: reward and an evaluation metric by step, one colour per variant, with a band over the seeds. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from grpo.commands.sweep.table import Spread
from grpo.report.read import RunData
from grpo.system import import_extra, write_atomically

SMOOTHED_SHARE = 20
"""A curve of training is a moving mean over this part of the steps: a twentieth."""
Curve = list[tuple[int, Spread]]


def draw(variants: dict[str, dict[int, RunData]], metric: str | None, path: Path) -> None:
    """Write the picture as a PNG file; ``metric``: the second panel's, None: the reward alone. ``ValueError`` without matplotlib."""
    import_extra("matplotlib", "plots", "the picture of a sweep")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    metrics = ["reward"] + [metric] * (metric not in (None, "reward"))
    figure = Figure(figsize=(5.5 * len(metrics), max(4.0, 0.25 * len(variants) + 1)), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)
    colors = colormaps["tab10" if len(variants) <= 10 else "tab20"].colors
    for axes, name in zip(panels[0], metrics, strict=True):
        window = _window(variants, name)
        curves = {variant: curve(list(runs.values()), name, window) for variant, runs in variants.items()}
        if max(map(len, curves.values()), default=0) > 1:
            _lines(axes, curves, colors)
        else:
            _points(axes, curves, colors)
        axes.set_title(f"{name}, mean of {window} steps" if window > 1 else name)
        axes.grid(alpha=0.3)
    lines, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.suptitle("mean over seeds; band: ± s.d.", fontsize="small")
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))


def curve(runs: Sequence[RunData], name: str, window: int = 1) -> Curve:
    """``(step, spread over the runs)`` of a metric at the steps where all runs have it, each run first as a moving mean of ``window`` steps."""
    series = [{line["step"]: line[name] for line in run.metrics if line.get(name) is not None} for run in runs]
    steps = sorted(set.intersection(*map(set, series))) if series else []
    points = []
    for end in range(window, len(steps) + 1):
        recent = steps[end - window : end]
        values = {i: statistics.fmean(one[step] for step in recent) for i, one in enumerate(series)}
        points.append((recent[-1], Spread.of(values)))
    return points


def _window(variants: dict[str, dict[int, RunData]], name: str) -> int:
    counts = [sum(name in line for line in run.metrics) for runs in variants.values() for run in runs.values()]
    return 1 if name.startswith("eval/") else max(min(counts, default=0) // SMOOTHED_SHARE, 1)


def _lines(axes, curves: dict[str, Curve], colors) -> None:
    for i, (variant, points) in enumerate(curves.items()):
        steps, means = [step for step, _ in points], [s.mean for _, s in points]
        color = colors[i % len(colors)]
        axes.plot(steps, means, color=color, label=variant, marker="o" if len(points) < 8 else None)
        low, high = ([s.mean + sign * (s.sd or 0.0) for _, s in points] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set_xlabel("step")


def _points(axes, curves: dict[str, Curve], colors) -> None:
    """A metric with a single step, such as an evaluation at the end only: one point per variant, with its s.d."""
    for i, (variant, points) in enumerate(curves.items()):
        for step, s in points:
            axes.errorbar(
                [s.mean], [i], xerr=[s.sd or 0.0], fmt="o", color=colors[i % len(colors)], capsize=3, label=variant
            )
            axes.set_xlabel(f"after step {step}")
    axes.set_yticks(range(len(curves)), [""] * len(curves))
    axes.invert_yaxis()

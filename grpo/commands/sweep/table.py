"""The table of a sweep: per variant and metric the mean over seeds, the standard deviation and the 95% interval; as Markdown and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo.commands.sweep.results import LAST_STEPS
from grpo.evaluation.intervals import LEVEL, student
from grpo.telemetry.console import is_rate

CAPTION = (
    f"mean ± s.d. [{LEVEL:.0%} interval of the mean], over the seeds",
    "The s.d. has n - 1 in its denominator. The interval is Student's t with n - 1 degrees of freedom, mean ± t s.d. / √n: it covers the\n"
    "difference between seeds, and is not cut at 0% or 100%. Evaluation: after the last step. Reward, completion length, entropy and KL: mean of\n"
    f"the last {LAST_STEPS} steps. Gradient norm and clipped tokens: mean of all steps. Seconds per step: median of all steps.",
)
TRAINING = {
    "completions/mean_length": "length, tokens",
    "entropy": "entropy, nats",
    "kl": "KL, nats",
    "grad_norm": "gradient norm",
    "clip_ratio/region_mean": "clipped tokens, %",
    "step_time": "seconds per step",
}
"""Columns of the second part of the table."""


@dataclass(frozen=True)
class Spread:
    """Values of one metric over the seeds of a variant."""

    mean: float
    sd: float | None
    """Sample standard deviation; None for a single value, as the interval."""
    low: float | None
    high: float | None
    values: dict[int, float]
    """By seed."""

    @classmethod
    def of(cls, values: dict[int, float]) -> Spread:
        numbers = list(values.values())
        if len(numbers) == 1:
            return cls(numbers[0], None, None, None, values)
        return cls(statistics.fmean(numbers), statistics.stdev(numbers), *student(numbers), values)


def spreads(runs: dict[int, dict[str, float]]) -> dict[str, Spread]:
    """Metric -> spread over the runs that have the metric; ``runs``: seed -> metric -> value."""
    names = dict.fromkeys(name for numbers in runs.values() for name in numbers)
    return {n: Spread.of({seed: numbers[n] for seed, numbers in runs.items() if n in numbers}) for n in names}


def main_metric(names: Sequence[str]) -> str | None:
    """The evaluation metric that a sweep is judged by first: the mean over samples if there are several, else the greedy accuracy."""
    means = [name for name in names if name.startswith("eval/mean@")]
    return means[-1] if means else "eval/greedy_accuracy" if "eval/greedy_accuracy" in names else None


def as_markdown(variants: dict[str, dict[int, dict[str, float]]]) -> str:
    """The table in two parts: results, and the behaviour of training. ``variants``: name -> seed -> metric -> value."""
    found = {name: spreads(runs) for name, runs in variants.items()}
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    means = [name for name in names if name.startswith("eval/mean@")]
    chosen = [name for name in ("eval/greedy_accuracy", *means, "eval/format", "reward") if name in names]
    results = {name: _title(name) for name in chosen}
    training = {name: title for name, title in TRAINING.items() if name in names}
    parts = [_part(found, variants, columns) for columns in (results, training) if columns]
    return "\n".join([f"{CAPTION[0]}\n", *parts, CAPTION[1], ""])


def _title(name: str) -> str:
    title = name.removeprefix("eval/").replace("_", " ")
    return f"{title}, %" if name.startswith("eval/") and is_rate(name) else title


def _part(found: dict[str, dict[str, Spread]], variants: dict[str, Any], columns: dict[str, str]) -> str:
    rows = [["variant", "seeds", *columns.values()]]
    for variant, metrics in found.items():
        if metrics and not columns.keys() & metrics.keys():
            continue  # the evaluation before training, in the part about training
        cells = [_cell(metrics.get(name), title) for name, title in columns.items()]
        rows.append([variant.replace("|", "\\|"), str(len(variants[variant])), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True))} |" for row in rows]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([lines[0], f"|{rule}|", *lines[1:], ""])


def _cell(spread: Spread | None, title: str) -> str:
    if spread is None:
        return "-"
    scale = 100 if title.endswith(", %") else 1
    # Three digits of the mean or of the s.d., whichever is larger; the same decimals for the whole cell, at least one for percentages.
    largest = scale * max(abs(spread.mean), spread.sd or 0.0)
    decimals = min(max(2 - math.floor(math.log10(largest)), 0), 5) if largest else 0
    decimals = max(decimals, int(scale == 100))

    def form(value: float) -> str:
        return f"{value * scale:.{decimals}f}"

    if spread.sd is None:
        return form(spread.mean)
    return f"{form(spread.mean)} ± {form(spread.sd)} [{form(spread.low)}, {form(spread.high)}]"


def as_json(variants: dict[str, dict[int, dict[str, float]]]) -> list[dict[str, Any]]:
    """Per variant all metrics, with every seed's value."""
    return [
        {"variant": name, "seeds": list(runs), "metrics": {metric: vars(s) for metric, s in spreads(runs).items()}}
        for name, runs in variants.items()
    ]

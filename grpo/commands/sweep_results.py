"""Results of a sweep: each metric of each variant, and its difference to the first variant with the
same seeds."""

import fnmatch
import math
from pathlib import Path
from typing import Any

import pandas

from grpo.system import write_atomically

NUM_LAST_STEPS = 10
"""Number of steps at the end of a run over which metrics are averaged. Metrics of a single step are
noisy."""
TABLE_METRICS = (
    "eval/greedy_accuracy",
    "eval/mean@*",
    "eval/format",
    "reward",
    "rewards/*/mean",
    "logged/*",
    "own/*",
    "completions/mean_length",
    "entropy",
    "kl",
    "grad_norm",
    "step_time",
)
"""Patterns of the metrics in the table, in the order of the table. The CSV file has all metrics."""
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of Student's t distribution with 1 to 10 degrees of freedom.

With more than 10 degrees of freedom, the last quantile is used, which makes intervals up to 14% too
wide.
"""
CAPTION = (
    "\nMean over the seeds ± half of its 95% interval (Student's t, n - 1 degrees of freedom).\n"
    "The difference is the mean over the seeds of the variant minus the first variant with the\n"
    "same seed; an interval without 0 tells the two apart, but of two seeds, or ± 0, it says next\n"
    "to nothing. Where every difference but that of the time is +0, the key changed none of them.\n"
    f"Evaluations: the last one. Other metrics: mean of the last {NUM_LAST_STEPS} steps.\n"
)

Results = dict[str, dict[int, list[dict[str, Any]]]]
"""Results by variant and seed: the lines of ``metrics.jsonl``. The first variant is the base, with
which the others are compared."""


def write_results(output: Path, results: Results) -> None:
    """Write ``sweep.md`` and ``sweep.csv``, and print the table."""
    rows = compare(results)
    table = as_markdown(rows, base=next(iter(results)))
    write_atomically(output / "sweep.md", table)
    write_atomically(output / "sweep.csv", rows.to_csv(index=False))
    print(table)
    print(f"written   {output}: sweep.md, sweep.csv")


def measure(metrics: list[dict[str, Any]]) -> pandas.Series:
    """Return one number per metric of a run: the value at the last evaluation, or the mean over the
    last steps."""
    # Step 0 is the evaluation before training, which says nothing about the variant.
    table = pandas.DataFrame(metrics, dtype=float).query("step > 0")
    # Most lines have no evaluation, so the last line with an evaluation is taken.
    evaluation = table.filter(regex="^eval/").dropna(how="all").tail(1)
    steps = table.filter(regex="^(?!eval/)").tail(NUM_LAST_STEPS)
    # The mean of one row is the row itself, and a mean leaves out the steps that lack a metric.
    return pandas.concat([evaluation.mean(), steps.mean()])


def compare(results: Results) -> pandas.DataFrame:
    """Return a table with one row for each variant and metric."""
    base = None
    parts = {}
    for variant, runs in results.items():
        # One row for each metric, one column for each seed.
        numbers = pandas.DataFrame({seed: measure(run) for seed, run in runs.items()})
        if base is None:
            base = numbers
        # Seeds may differ more than variants do, so variants are compared seed by seed. The
        # difference is NaN if one of the two variants lacks the seed or the metric.
        # Rounding errors would look like a difference.
        difference = (numbers - base).round(12)
        columns = {
            "seeds": numbers.count(axis=1),
            "mean": numbers.mean(axis=1),
            "mean_95": margin_of_error(numbers),
            "difference": difference.mean(axis=1),
            "difference_95": margin_of_error(difference),
        }
        parts[variant] = pandas.DataFrame(columns)
    rows = pandas.concat(parts, names=["variant", "metric"]).reset_index()
    return rows[rows["seeds"] > 0].astype({"seeds": int})


def margin_of_error(numbers: pandas.DataFrame) -> pandas.Series:
    """Return the margin of error of each row's mean: half the width of its 95% interval.

    The margin is NaN for fewer than two numbers, which have no standard deviation.
    """
    n = numbers.count(axis=1)
    # n numbers have n - 1 degrees of freedom, and the first quantile is for one degree of freedom.
    quantiles = n.map(lambda count: T_QUANTILES[min(count - 2, len(T_QUANTILES) - 1)])
    return quantiles * numbers.std(axis=1) / n**0.5


def as_markdown(rows: pandas.DataFrame, base: str) -> str:
    """Return the Markdown table of ``TABLE_METRICS``, followed by its caption."""
    # Cells are padded to equal width, because the table is also printed. The heading has the name
    # of a variant and 14 characters; a difference has up to 22, and a name at least 4.
    width = rows["variant"].str.len().max()
    heading = f"difference to {base}"
    lines = [
        f"| {'metric':24} | {'variant':{width}} | seeds | {'mean':22} | {heading:{width + 18}} |",
        f"|-{'-' * 24}-|-{'-' * width}-|-------|-{'-' * 22}-|-{'-' * (width + 18)}-|",
    ]
    for pattern in TABLE_METRICS:
        for metric in fnmatch.filter(rows["metric"].unique(), pattern):
            for row in rows[rows["metric"] == metric].itertuples():
                mean = _cell(row.mean, row.mean_95)
                difference = _cell(row.difference, row.difference_95, sign="+")
                if row.variant == base:
                    difference = ""
                lines.append(
                    f"| {metric:24} | {row.variant:{width}} | {row.seeds:5} "
                    f"| {mean:22} | {difference:{width + 18}} |"
                )
    return "\n".join(lines) + "\n" + CAPTION


def _cell(value: float, margin: float, sign: str = "") -> str:
    """Return the text of a value with its margin of error. ``sign="+"`` also shows the sign of
    positive values."""
    if math.isnan(value):
        return "-"
    text = f"{value:{sign}.4g}"
    if math.isnan(margin):
        return text
    return f"{text} ± {margin:.2g}"

"""The results of a sweep: each metric of each variant, and its difference to the first one with the
same seeds."""

import fnmatch
import math
from pathlib import Path
from typing import Any

import pandas

from grpo.system import write_atomically

LAST_STEPS = 10
SHOWN = (
    "eval/greedy_accuracy",
    "eval/mean@*",
    "eval/format",
    "reward",
    "rewards/*/mean",
    "logged/*",
    "completions/mean_length",
    "entropy",
    "kl",
    "grad_norm",
    "step_time",
)
"""The metrics of the table in its order; the CSV file has all."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of Student's t distribution with 1 to 10 degrees of freedom. For more the last
one is taken, which makes intervals up to 14% too wide."""
CAPTION = f"""
Mean over the seeds ± half of its 95% interval. The difference is the mean over the seeds of the variant minus the
first variant with the same seed; an interval without 0 tells the two apart. Student's t, n - 1 degrees of freedom;
one seed has no interval. Evaluations: the last one. Other metrics: mean of the last {LAST_STEPS} steps.
"""

Results = dict[str, dict[int, list[dict[str, Any]]]]
"""Variant -> seed -> the lines of ``metrics.jsonl``; the base, to which all are compared, comes
first."""


def write_results(output: Path, results: Results) -> None:
    """Write ``sweep.md`` and ``sweep.csv``, and print the table."""
    rows = compare(results)
    table = as_markdown(rows, base=next(iter(results)))
    write_atomically(output / "sweep.md", table)
    write_atomically(output / "sweep.csv", rows.to_csv(index=False))
    print(table)
    print(f"written   {output}: sweep.md, sweep.csv", flush=True)


def measure(metrics: list[dict[str, Any]]) -> pandas.Series:
    """The numbers of one run by metric: its last evaluation, and the means of the last steps."""
    table = pandas.DataFrame(metrics, dtype=float).query("step > 0")
    evaluation = table.filter(regex="^eval/").dropna(how="all").tail(1)
    steps = table.filter(regex="^(?!eval/)").tail(LAST_STEPS)
    return pandas.concat([evaluation.mean(), steps.mean()])


def compare(results: Results) -> pandas.DataFrame:
    """One row for each variant and metric."""
    values = {}
    for variant, runs in results.items():
        values[variant] = pandas.DataFrame({seed: measure(run) for seed, run in runs.items()})
    base = next(iter(values.values()))
    parts = {}
    for variant, numbers in values.items():
        difference = numbers - base  # NaN with a seed, and of a metric, that one of the two lacks
        columns = {
            "seeds": numbers.count(axis=1),
            "mean": numbers.mean(axis=1),
            "mean_95": half_width(numbers),
            "difference": difference.mean(axis=1),
            "difference_95": half_width(difference),
        }
        parts[variant] = pandas.DataFrame(columns)
    rows = pandas.concat(parts, names=["variant", "metric"]).reset_index()
    return rows[rows["seeds"] > 0].astype({"seeds": int})


def half_width(numbers: pandas.DataFrame) -> pandas.Series:
    """Half of the 95% interval of each row's mean; NaN for fewer than two numbers, which have no
    s.d."""
    n = numbers.count(axis=1)
    quantiles = n.map(lambda count: STUDENT[min(count - 2, len(STUDENT) - 1)])
    return quantiles * numbers.std(axis=1) / n**0.5


def as_markdown(rows: pandas.DataFrame, base: str) -> str:
    """The table of the metrics of ``SHOWN``."""
    width = rows["variant"].str.len().max()
    lines = [
        f"| {'metric':24} | {'variant':{width}} | seeds | {'mean':22} | {'difference to ' + base:22} |",
        f"|-{'-' * 24}-|-{'-' * width}-|-------|-{'-' * 22}-|-{'-' * 22}-|",
    ]
    for pattern in SHOWN:
        for metric in fnmatch.filter(rows["metric"].unique(), pattern):
            for row in rows[rows["metric"] == metric].itertuples():
                mean = _cell(row.mean, row.mean_95)
                difference = _cell(row.difference, row.difference_95, sign="+")
                if row.variant == base:
                    difference = ""
                lines.append(
                    f"| {metric:24} | {row.variant:{width}} | {row.seeds:5} | {mean:22} | {difference:22} |"
                )
    return "\n".join(lines) + "\n" + CAPTION


def _cell(
    value: float,
    half: float,
    sign: str = "",
) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:{sign}.4g}"
    return text if math.isnan(half) else f"{text} ± {half:.2g}"

"""The lines that a run prints about its steps and evaluations."""

from typing import Any

from tqdm import tqdm

from grpo.telemetry.records import is_computed

STEP_COLUMNS = (
    ("frac_reward_zero_std", "equal groups", "{:.0%}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("turns/mean", "turns", "{:.2f}"),
    ("tools/failure_frequency", "failed calls", "{:.0%}"),
    ("step_time", "seconds", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
)
"""Metrics in the order of a step's line, each with its label on the console and its format."""
FORM_METRICS = ("eval/format", "eval/lenient_accuracy")
"""Evaluation metrics of a form (tags, a number at the end) that most tasks do not ask for."""
EVAL_REWARDS_PREFIX = "eval/rewards/"
"""Prefix of the evaluation metrics that are means of reward functions."""


def console_line(metrics: dict[str, Any], max_steps: int) -> str:
    """Return the line of a step: the reward, the mean of each reward function, the metrics of
    ``STEP_COLUMNS``, and the time left.

    Args:
        metrics: metrics of the step that were computed. Other metrics are left out of the line.
    """
    # The reward comes first: it shows whether the run learns.
    columns = [("reward", "reward", "{:.3f}")]
    for name in metrics:
        if not name.startswith("rewards/"):
            continue
        if name.endswith("/mean"):
            function = name.split("/")[1]
            columns.append((name, function, "{:.3f}"))
        elif name.endswith("/errors") and metrics[name]:
            # A completion without a score is left out of the mean above.
            columns.append((name, "errors", "{:.0f}"))
    columns.extend(STEP_COLUMNS)

    step = metrics["step"]
    parts = [f"step {_place(step, max_steps)}"]
    for name, label, number_format in columns:
        if name in metrics:
            parts.append(f"{label} {number_format.format(metrics[name])}")
    # The time left assumes that all steps take as long as this one, and counts no evaluations.
    num_left = max_steps - step
    if num_left and "step_time" in metrics:
        parts.append(f"left {tqdm.format_interval(num_left * metrics['step_time'])}")
    return "  ".join(parts)


def _place(step: int, max_steps: int) -> str:
    """Return the step and the number of steps, such as ``50/150``. The width is the same for every
    step, so that the columns of successive lines are aligned."""
    return f"{step:>{len(str(max_steps))}}/{max_steps}"


def evaluation_line(metrics: dict[str, Any], max_steps: int) -> str:
    """Return the line of an evaluation, such as ``eval 50/150 greedy accuracy 98.5% ...``."""
    parts = [f"eval {_place(metrics['step'], max_steps)}"]
    for name in _console_names(metrics):
        parts.append(f"{_label(name)} {evaluation_text(name, metrics[name])}")
    return "  ".join(parts)


def evaluation_table(
    before: dict[str, float] | None,
    after: dict[str, float],
) -> str:
    """Return two evaluations side by side, one metric per line. ``before`` is None if nothing was
    evaluated before training."""
    before = before or {}
    rows = [f"{'':28}{'before':>10}{'after':>10}"]
    for name in _console_names(after):
        value_before = evaluation_text(name, before.get(name))
        value_after = evaluation_text(name, after[name])
        rows.append(f"{_label(name):28}{value_before:>10}{value_after:>10}")
    return "\n".join(rows)


def evaluation_text(
    name: str,
    value: float | None,
) -> str:
    """Return the value of an evaluation metric as text. Rates are in percent, and a metric that was
    not computed is ``-``."""
    if not is_computed(value):
        return "-"
    if is_rate(name):
        return f"{value:.1%}"
    return f"{value:.4g}"


def is_rate(name: str) -> bool:
    """True if an evaluation metric is a fraction of problems or completions, False if it is a
    reward or a length."""
    return not name.endswith("mean_length") and not name.startswith(EVAL_REWARDS_PREFIX)


def _console_names(metrics: dict[str, Any]) -> list[str]:
    """Return the names of an evaluation's metrics that the console shows.

    The console shows only the accuracy of greedy decoding, and pass@k only for the largest k. A
    form that no completion has is left out.
    """
    names = {}
    for name in metrics:
        is_hidden = name.startswith("eval/greedy_") and name != "eval/greedy_accuracy"
        is_unasked = name in FORM_METRICS and not metrics[name] > 0
        if name.startswith("eval/") and not is_hidden and not is_unasked:
            # All pass@k have the same key here. A larger k comes later, and replaces the others.
            kind, at, _ = name.partition("pass@")
            names[kind + at] = name
    return list(names.values())


def _label(name: str) -> str:
    """The name of an evaluation metric on the console."""
    label = name.removeprefix("eval/")
    # The user has named the reward function: its name stays as it is.
    if name.startswith(EVAL_REWARDS_PREFIX):
        return label
    return label.replace("_", " ")

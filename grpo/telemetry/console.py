"""The lines that a run prints about its steps and evaluations."""

from typing import Any

from tqdm import tqdm

from grpo.telemetry.records import is_computed

STEP_COLUMNS = (
    ("completions/mean_length", "length", "{:.1f}"),
    ("turns/mean", "turns", "{:.2f}"),
    ("tools/failure_frequency", "failed calls", "{:.0%}"),
    ("step_time", "seconds", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
)
"""Metric, its label on the console and its format, in the order of a step's line."""
EVAL_REWARDS_PREFIX = "eval/rewards/"
"""Metrics of evaluations that begin so are means of reward functions."""


def console_line(metrics: dict[str, Any], max_steps: int) -> str:
    """The line of a step: the reward, its parts, the metrics of ``STEP_COLUMNS``, the time left.

    Args:
        metrics: those of the step that were computed; the others are left out of the line.
    """
    # The reward comes first: it shows whether the run learns.
    columns = [("reward", "reward", "{:.3f}")]
    for name in metrics:
        if name.startswith("rewards/") and name.endswith("/mean"):
            function = name.split("/")[1]
            columns.append((name, function, "{:.3f}"))
    columns.extend(STEP_COLUMNS)

    step = metrics["step"]
    parts = [f"step {_place(step, max_steps)}"]
    for name, label, number_format in columns:
        if name in metrics:
            number = number_format.format(metrics[name])
            parts.append(f"{label} {number}")
    # As if all steps took as long as this one, without evaluations.
    num_left = max_steps - step
    if num_left and "step_time" in metrics:
        time_left = tqdm.format_interval(num_left * metrics["step_time"])
        parts.append(f"left {time_left}")
    return "  ".join(parts)


def _place(step: int, max_steps: int) -> str:
    """``50/150``, as wide for every step, so that the columns of lines stand below each other."""
    digits = len(str(max_steps))
    return f"{step:>{digits}}/{max_steps}"


def evaluation_line(metrics: dict[str, Any], max_steps: int) -> str:
    """The line of an evaluation: ``eval  50/150  greedy accuracy 98.5%  ...``."""
    parts = [f"eval {_place(metrics['step'], max_steps)}"]
    for name in _console_names(metrics):
        value = evaluation_text(name, metrics[name])
        parts.append(f"{_label(name)} {value}")
    return "  ".join(parts)


def evaluation_table(
    before: dict[str, float] | None,
    after: dict[str, float],
) -> str:
    """Two evaluations side by side, one metric per line; ``before`` is None if there was none."""
    before = before or {}
    rows = [f"{'':28}{'before':>10}{'after':>10}"]
    for name in _console_names(after):
        label = _label(name)
        value_before = evaluation_text(name, before.get(name))
        value_after = evaluation_text(name, after[name])
        rows.append(f"{label:28}{value_before:>10}{value_after:>10}")
    return "\n".join(rows)


def evaluation_text(
    name: str,
    value: float | None,
) -> str:
    """The value of an evaluation metric as text: rates in percent; ``-`` if it was not computed."""
    if not is_computed(value):
        return "-"
    if is_rate(name):
        return f"{value:.1%}"
    return f"{value:.4g}"


def is_rate(name: str) -> bool:
    """True if an evaluation metric is a fraction of problems or completions: no reward or
    length."""
    is_length = name.endswith("mean_length")
    return not is_length and not name.startswith(EVAL_REWARDS_PREFIX)


def _console_names(metrics: dict[str, Any]) -> list[str]:
    """The metrics of an evaluation that the console shows.

    Those of greedy decoding but its accuracy, and pass@k but for the largest k, are left out.
    """
    names = {}
    for name in metrics:
        is_greedy = name.startswith("eval/greedy_")
        is_hidden = is_greedy and name != "eval/greedy_accuracy"
        if name.startswith("eval/") and not is_hidden:
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

"""The lines of a run on the console."""

from typing import Any

from tqdm import tqdm

from grpo.telemetry.records import is_computed

COLUMNS = (
    ("completions/mean_length", "length", "{:.1f}"),
    ("turns/mean", "turns", "{:.2f}"),
    ("tools/failure_frequency", "failed calls", "{:.0%}"),
    ("step_time", "seconds", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
)
"""Metric, its name on the console and its format, in the order of the line of a step."""
REWARDS = "eval/rewards/"


def console_line(metrics: dict[str, Any], max_steps: int) -> str:
    """One step: the reward, its parts, length, seconds, KL, entropy, and the time that is left.

    Args:
        metrics: those that were computed.
    """
    columns = [("reward", "reward", "{:.3f}")]
    for name in metrics:
        if name.startswith("rewards/") and name.endswith("/mean"):
            function = name.split("/")[1]
            columns.append((name, function, "{:.3f}"))
    columns.extend(COLUMNS)

    step = metrics["step"]
    parts = [f"step {_place(step, max_steps)}"]
    for name, label, form in columns:
        if name in metrics:
            number = form.format(metrics[name])
            parts.append(f"{label} {number}")
    num_left = max_steps - step
    if num_left and "step_time" in metrics:
        left = tqdm.format_interval(num_left * metrics["step_time"])
        parts.append(f"left {left}")
    return "  ".join(parts)


def _place(step: int, max_steps: int) -> str:
    digits = len(str(max_steps))
    return f"{step:>{digits}}/{max_steps}"


def evaluation_line(metrics: dict[str, Any], max_steps: int) -> str:
    """One evaluation: ``eval  50/150  greedy accuracy 98.5%  ...``."""
    parts = [f"eval {_place(metrics['step'], max_steps)}"]
    for name in _console_names(metrics):
        value = evaluation_text(name, metrics[name])
        parts.append(f"{_label(name)} {value}")
    return "  ".join(parts)


def evaluation_table(
    before: dict[str, float] | None,
    after: dict[str, float],
) -> str:
    """Two evaluations side by side, one metric per line."""
    rows = [f"{'':28}{'before':>10}{'after':>10}"]
    for name in _console_names(after):
        label = _label(name)
        first = evaluation_text(name, (before or {}).get(name))
        last = evaluation_text(name, after[name])
        rows.append(f"{label:28}{first:>10}{last:>10}")
    return "\n".join(rows)


def evaluation_text(
    name: str,
    value: float | None,
) -> str:
    """The value of an evaluation metric: rates as percentages; ``-`` if it was not computed."""
    if not is_computed(value):
        return "-"
    return f"{value:.1%}" if is_rate(name) else f"{value:.4g}"


def is_rate(name: str) -> bool:
    """True if an evaluation metric is a share of problems or completions, not a reward or
    length."""
    is_length = name.endswith("mean_length")
    return not is_length and not name.startswith(REWARDS)


def _console_names(metrics: dict[str, Any]) -> list[str]:
    """The metrics that the console shows: of greedy decoding the accuracy, of pass@k that of the
    largest k."""
    shown = {}
    for name in metrics:
        is_greedy = name.startswith("eval/greedy_")
        is_hidden = is_greedy and name != "eval/greedy_accuracy"
        if name.startswith("eval/") and not is_hidden:
            kind, at, _ = name.partition("pass@")
            shown[kind + at] = name  # a larger k comes later
    return list(shown.values())


def _label(name: str) -> str:
    label = name.removeprefix("eval/")
    if name.startswith(REWARDS):
        return label  # a reward has the same name everywhere
    return label.replace("_", " ")

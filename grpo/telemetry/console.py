"""The lines of a run on the console, and the numbers beside its progress bar."""

from collections.abc import Iterable
from typing import Any

from grpo.telemetry.records import is_computed

COLUMNS = (
    ("completions/mean_length", "length", "{:.1f}"),
    ("turns/mean", "turns", "{:.2f}"),
    ("tools/failure_frequency", "failed calls", "{:.0%}"),
    ("step_time", "seconds", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("frac_reward_zero_std", "equal-reward groups", "{:.0%}"),
    ("grad_norm", "grad norm", "{:.3f}"),
    ("learning_rate", "lr", "{:.1e}"),
    ("tokens_per_second", "tokens/s", "{:.0f}"),
)
"""Metric, its name on the console and its format, in the order of the line of a step."""
PASS_AT = "eval/pass@"
REWARDS = "eval/rewards/"


def console_line(
    metrics: dict[str, Any],
    max_steps: int,
    left: str | None = None,
    width: int | None = None,
) -> str:
    """One step: the reward, its parts, length, seconds, health of the run, and the time that is left.

    On a terminal of ``width`` columns the metrics that do not fit are left out, the last ones first.

    Args:
        metrics: those that were computed.
    """
    columns = [("reward", "reward", "{:.3f}")]
    for name in metrics:
        if name.startswith("rewards/") and name.endswith("/mean"):
            function = name.split("/")[1]
            columns.append((name, function, "{:.3f}"))
    columns.extend(COLUMNS)

    parts = [_number_of_step("step", metrics, max_steps)]
    for name, label, form in columns:
        if name in metrics:
            number = form.format(metrics[name])
            parts.append(f"{label} {number}")
    end = [] if left is None else [f"left {left}"]
    return _fitted(parts, end, width)


def _number_of_step(
    kind: str,
    metrics: dict[str, Any],
    max_steps: int,
) -> str:
    digits = len(str(max_steps))
    return f"{kind} {metrics['step']:>{digits}}/{max_steps}"


def _fitted(
    parts: list[str],
    end: list[str],
    width: int | None,
) -> str:
    """The parts in one line; on a narrow terminal without the last ones, but with the first two."""
    line = "  ".join(parts + end)
    while width and len(line) > width and len(parts) > 2:
        parts.pop()
        line = "  ".join(parts + end)
    return line


def evaluation_line(
    metrics: dict[str, Any],
    max_steps: int,
    width: int | None = None,
) -> str:
    """One evaluation: ``eval  50/150  greedy accuracy 98.5%  ...``, cut as the line of a step."""
    parts = [_number_of_step("eval", metrics, max_steps)]
    for name in _console_names(metrics):
        value = evaluation_text(name, metrics[name])
        parts.append(f"{_label(name)} {value}")
    return _fitted(parts, [], width)


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
    if is_rate(name):
        return f"{value:.1%}"
    if name.startswith(REWARDS):
        return f"{value:.4f}"
    return f"{value:.2f}"


def is_rate(name: str) -> bool:
    """True if an evaluation metric is a share of problems or completions, not a reward or length."""
    is_length = name.endswith("mean_length")
    return not is_length and not name.startswith(REWARDS)


def without_most_pass_at_k(
    names: Iterable[str],
) -> list[str]:
    """Names of evaluation metrics, of ``pass@k`` only those with k = 1, 2, 4, ... and the largest k."""
    names = list(names)
    at_k = [name for name in names if name.startswith(PASS_AT)]
    ks = [int(name.removeprefix(PASS_AT)) for name in at_k]
    shown = [f"{PASS_AT}{k}" for k in ks if k & (k - 1) == 0 or k == max(ks)]
    return [name for name in names if name in shown or name not in at_k]


def _console_names(metrics: dict[str, Any]) -> list[str]:
    """The metrics that the console shows.

    Of greedy decoding only the accuracy; not pass@1, which is mean@k.
    """
    names = []
    for name in without_most_pass_at_k(metrics):
        is_greedy = name.startswith("eval/greedy_")
        is_hidden = is_greedy and name != "eval/greedy_accuracy"
        if name.startswith("eval/") and not is_hidden:
            names.append(name)
    return [name for name in names if name != "eval/pass@1"]


def _label(name: str) -> str:
    label = name.removeprefix("eval/")
    if name.startswith(REWARDS):
        return label  # a reward has the same name everywhere
    return label.replace("_", " ")

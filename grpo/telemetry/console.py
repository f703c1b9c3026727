"""The lines of a run on the console, and the numbers beside its progress bar."""

from collections.abc import Iterable
from typing import Any


def console_line(metrics: dict[str, Any], max_steps: int, left: str | None = None, width: int | None = None) -> str:
    """One step: the reward, its parts, length, seconds, metrics that show its health, and the time that is left.

    On a terminal of ``width`` columns the metrics that do not fit are left out, the last ones first.
    """
    parts = [f"step {metrics['step']:>{len(str(max_steps))}}/{max_steps}", f"reward {metrics['reward']:.3f}"]
    means = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    parts += [f"{name.split('/')[1]} {metrics[name]:.3f}" for name in means]
    columns = (("completions/mean_length", "length", ".1f"), ("turns/mean", "turns", ".2f"),
               ("tools/failure_frequency", "failed calls", ".0%"), ("step_time", "seconds", ".2f"), ("kl", "kl", ".4f"),
               ("entropy", "entropy", ".3f"), ("frac_reward_zero_std", "equal-reward groups", ".0%"),
               ("grad_norm", "grad norm", ".3f"), ("learning_rate", "lr", ".1e"),
               ("tokens_per_second", "tokens/s", ".0f"))  # fmt: skip
    parts += [f"{label} {metrics[name]:{form}}" for name, label, form in columns if name in metrics]
    return _fitted(parts, [f"left {left}"] * (left is not None), width)


def _fitted(parts: list[str], end: list[str], width: int | None) -> str:
    while width is not None and len(parts) > 2 and len("  ".join(parts + end)) > width:
        parts.pop()
    return "  ".join(parts + end)


def evaluation_line(metrics: dict[str, Any], max_steps: int, width: int | None = None) -> str:
    """One evaluation: ``eval  50/150  greedy accuracy 98.5%  ...``, cut as the line of a step."""
    parts = [f"eval {metrics['step']:>{len(str(max_steps))}}/{max_steps}"]
    parts += [f"{_label(name)} {evaluation_form(name).format(metrics[name])}" for name in _console_names(metrics)]
    return _fitted(parts, [], width)


def evaluation_table(before: dict[str, float] | None, after: dict[str, float]) -> str:
    """Two evaluations side by side, one metric per line."""
    rows = [f"{'':28}{'before':>10}{'after':>10}"]
    for name in _console_names(after):
        form = evaluation_form(name)
        old = form.format(before[name]) if before and name in before else "-"
        rows.append(f"{_label(name):28}{old:>10}{form.format(after[name]):>10}")
    return "\n".join(rows)


def evaluation_form(name: str) -> str:
    """The format string of an evaluation metric: percentages for rates, plain numbers for rewards and lengths."""
    if is_rate(name):
        return "{:.1%}"
    return "{:.4f}" if name.startswith("eval/rewards/") else "{:.2f}"


def is_rate(name: str) -> bool:
    """True if an evaluation metric is a share of problems or completions, False for rewards and lengths."""
    return not name.startswith("eval/rewards/") and not name.endswith("mean_length")


def without_most_pass_at_k(names: Iterable[str]) -> list[str]:
    """Names of evaluation metrics, but of ``pass@k`` only those with k = 1, 2, 4, ... and the largest k."""
    names = list(names)
    ks = {name: int(k) for name in names if (k := name.removeprefix("eval/pass@")).isdecimal()}
    return [name for name in names if name not in ks or ks[name] & (ks[name] - 1) == 0 or ks[name] == max(ks.values())]


def _console_names(metrics: dict[str, Any]) -> list[str]:
    """The metrics that the console shows: of greedy decoding only the accuracy; not pass@1, which is mean@k."""
    names = without_most_pass_at_k(name for name in metrics if name.startswith("eval/") and name != "eval/pass@1")
    return [name for name in names if not name.startswith("eval/greedy_") or name == "eval/greedy_accuracy"]


def _label(name: str) -> str:
    label = name.removeprefix("eval/")
    return label if label.startswith("rewards/") else label.replace("_", " ")  # a reward has the same name everywhere

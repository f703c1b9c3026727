"""What a person reads on the console: the bar of steps, a line per step, evaluations, mistakes."""

from __future__ import annotations

import sys
from typing import Any


def print_mistake(mistake: Exception) -> None:
    """What a user can mend, on stderr: each line of the message starts with ``error: ``."""
    for line in str(mistake).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


def postfix(metrics: dict[str, Any]) -> dict[str, str]:
    """What the bar of steps shows beside the time left."""
    shown = (("reward", "reward", ".3f"), ("kl", "kl", ".4f"), ("completions/mean_length", "len", ".0f"),
             ("tokens_per_second", "tok/s", ".0f"))  # fmt: skip
    return {label: f"{metrics[name]:{form}}" for name, label, form in shown if metrics.get(name) is not None}


def console_line(metrics: dict[str, Any], max_steps: int) -> str:
    """One line a step, led by the reward."""
    parts = [f"step {metrics['step']:>{len(str(max_steps))}}/{max_steps}", f"reward {metrics['reward']:.3f}"]
    parts += [
        f"{name.split('/')[1]} {metrics[name]:.3f}"
        for name in metrics
        if name.startswith("rewards/") and name.endswith("/mean")
    ]
    shown = (("kl", "kl", ".4f"), ("entropy", "entropy", ".3f"), ("completions/mean_length", "len", ".1f"),
             ("frac_reward_zero_std", "equal", ".2f"), ("grad_norm", "grad", ".3f"), ("learning_rate", "lr", ".1e"),
             ("tokens_per_second", "tok/s", ".0f"), ("step_time", "s", ".2f"))  # fmt: skip
    return "  ".join(parts + [f"{label} {metrics[name]:{form}}" for name, label, form in shown if name in metrics])


def evaluation_line(metrics: dict[str, Any], max_steps: int) -> str:
    """One line for an evaluation between the first and the last."""
    parts = [f"eval {metrics['step']:>{len(str(max_steps))}}/{max_steps}"]
    return "  ".join(parts + [f"{_spoken(n)} {evaluation_form(n).format(metrics[n])}" for n in _shown(metrics)])


def evaluation_table(before: dict[str, float] | None, after: dict[str, float]) -> str:
    """Evaluations side by side, one metric a line."""
    rows = [f"{'':28}{'before':>10}{'after':>10}"]
    for name in _shown(after):
        form = evaluation_form(name)
        old = form.format(before[name]) if before and name in before else "-"
        rows.append(f"{_spoken(name):28}{old:>10}{form.format(after[name]):>10}")
    return "\n".join(rows)


def evaluation_form(name: str) -> str:
    """How a metric of an evaluation is written: rates as percentages, lengths and rewards as they are."""
    if name.startswith("eval/rewards/"):
        return "{:.4f}"
    return "{:.2f}" if name.endswith("mean_length") else "{:.1%}"


def _shown(metrics: dict[str, Any]) -> list[str]:
    """What the console shows of an evaluation: of pass@k the powers of two and the last, of greedy decoding the accuracy."""
    ks = [int(name.removeprefix("eval/pass@")) for name in metrics if name.startswith("eval/pass@")]
    hidden = {f"eval/pass@{k}" for k in ks if k & (k - 1) and k != max(ks)}
    hidden |= {name for name in metrics if name.startswith("eval/greedy_") and name != "eval/greedy_accuracy"}
    return [name for name in metrics if name.startswith("eval/") and name not in hidden]


def _spoken(name: str) -> str:
    return name.removeprefix("eval/").replace("_", " ")

"""Hints on made-up metrics: each is given at the right step, once, and not without cause."""

import pytest
from conftest import ROOT

from grpo.telemetry.hints import RULES, Hints

HEALTHY = {
    "kl": 0.01, "entropy": 1.0, "frac_reward_zero_std": 0.3, "completions/clipped_ratio": 0.05,
    "clip_ratio/region_mean": 0.01, "sampling/logprob_difference": 0.003,
}  # fmt: skip


def hints_of(num_steps: int, name: str, value) -> list[tuple[int, str]]:
    """``(step, hint)`` of a run with ``HEALTHY`` metrics, apart from one, a function of the step."""
    hints, given = Hints(), []
    for step in range(1, num_steps + 1):
        metrics = {"step": step, "reward": step / 200, **HEALTHY, name: value(step)}
        given += [(step, hint) for hint in hints.update(metrics)]
    return given


def after(step, then, before):
    return lambda now: then if now > step else before


CASES = {
    # rule -> (metric, its value as a function of the step, step of the hint, words of the hint)
    "KL": ("kl", after(10, 0.8, 0.01), 17, "0.56 nats per token"),  # (3 * 0.01 + 7 * 0.8) / 10
    "entropy": ("entropy", after(30, 0.05, 1.0), 40, "from 1.000 to 0.050"),
    "equal rewards": ("frac_reward_zero_std", after(10, 0.99, 0.3), 18, "85% of the groups"),
    "truncation": ("completions/clipped_ratio", lambda step: 0.5, 10, "50% of the completions"),
    "clipping": ("clip_ratio/region_mean", lambda step: 0.4, 10, "40% of the tokens"),
    "shared cores": ("time/frac_core_wait", after(3, 0.5, 0.0), 4, "for 50% of this step"),
    "no score": ("frac_unscorable", after(3, 1.0, 0.5), 4, "no completion of this step has a score"),
    "log-prob difference": ("sampling/logprob_difference", lambda step: 0.2, 10, "differ by 0.200 nats"),
}


@pytest.mark.parametrize("rule", CASES)
def test_a_hint_is_given_once_and_alone(rule):
    name, value, step, words = CASES[rule]
    ((at, hint),) = hints_of(60, name, value)
    assert at == step and words in hint


def test_a_healthy_run_and_steps_without_a_number_get_no_hint():
    assert hints_of(100, "kl", lambda step: 0.01) == []
    assert hints_of(50, "kl", lambda step: 9.0 if step % 9 else None) == [], "never ten numbers in a row"
    assert Hints().update({"step": 0, "eval/greedy_accuracy": 0.5}) == []


def test_rules_and_limits_are_those_of_the_document():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert set(CASES) == {*RULES, "entropy"}
    for rule, (name, limit, _) in RULES.items():
        assert f"| {rule} | `{name}` above {limit:g} |" in text, rule

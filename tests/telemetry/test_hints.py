"""Hints on made-up metrics: each is given at the right step, once, and not without cause."""

import pytest
from conftest import ROOT

from grpo.telemetry.hints import HINT_RULES, Hints

HEALTHY = {"reward": 0.5, "learning_rate": 1e-6}
for rule in HINT_RULES:
    HEALTHY[rule.metric] = rule.below * 2 if rule.below > 0 else rule.above / 2
NAN = float("nan")


def given(metric: str, values: list) -> list[tuple[int, str]]:
    """``(step, hint)`` of a run with ``HEALTHY`` metrics, apart from one."""
    hints = Hints()
    found = []
    for step, value in enumerate(values, start=1):
        for hint in hints.update(HEALTHY | {metric: value}):
            found.append((step, hint))
    return found


@pytest.mark.parametrize(
    ("metric", "values", "step", "words"),
    [
        ("kl", [0.01] * 10 + [0.8] * 40, 17, "0.56 nats per token"),  # (3 * 0.01 + 7 * 0.8) / 10
        ("kl", [0.0001] * 30, 10, "try optim.learning_rate=1e-05"),
        ("grad_norm", [0.5] * 3 + [0.0] * 20, 13, "the gradient is 0"),
        ("grad_norm", [0.5] * 3 + [400.0] * 20, 4, "the gradient is 100,"),
        ("entropy", [1.0] * 30 + [0.01] * 30, 40, "entropy is 0.010"),
        ("frac_reward_zero_std", [0.3] * 10 + [0.99] * 20, 18, "85% of the groups"),
        ("reward_std", [0.0] * 30, 3, "all completions that have a reward have the same"),
        ("completions/clipped_ratio", [0.5] * 30, 3, "50% of the completions"),
        ("tools/call_frequency", [0.5, 0.5] + [0.0] * 30, 12, "no call was made"),
        ("tools/failure_frequency", [1.0] * 30, 3, "100% of the tool calls fail"),
        ("stop_reason/failed", [0.0] * 10 + [0.5] * 20, 13, "failed in 15% of the completions"),
        ("frac_unscorable", [0.8] * 30, 3, "80% of the completions have no score"),
        ("frac_unscorable", [0.2] * 30, 3, "20% of the completions have no score"),
        ("frac_unscorable", [1.0] * 30, 1, "100% of the completions have no score"),
        ("rewards/accuracy/mean", [0.0] * 30, 3, "0.0% of the completions are right"),
        ("rewards/accuracy/mean", [0.6] * 10 + [1.0] * 30, 18, "92% of the completions are right"),
        ("time/frac_core_wait", [0.0] * 3 + [0.5] * 20, 6, "25% of the time"),  # 3 * 0.5 / 6
        # over the numbers that there are
        (
            "kl",
            [None, 9.0, None, None, NAN, 9.0] + [None] * 20,
            3,
            "9.00 nats",
        ),
    ],
)
def test_a_hint_is_given_once_and_alone(metric, values, step, words):
    ((at, hint),) = given(metric, values)
    assert at == step and words in hint


def test_the_higher_rate_is_that_of_the_schedules_peak():
    """Warm-up, peak, decay: 0, 1e-6, 5e-7 and so on."""
    hints = Hints()
    for rate in [0.0, 1e-6, 5e-7] + [1e-8] * 9:
        hints.update(HEALTHY | {"kl": 0.0, "learning_rate": rate})
    assert "try optim.learning_rate=1e-05" in hints.verdict()["no movement"]


def test_equal_rewards_explain_that_nothing_moves():
    """Without a gradient the policy moves at no learning rate."""
    hints = Hints()
    for _ in range(12):
        hints.update(HEALTHY | {"frac_reward_zero_std": 0.95, "kl": 0.0})
    assert list(hints.verdict()) == ["equal rewards"]


@pytest.mark.parametrize(("accuracy", "name"), [(0.0, "never right"), (0.95, "learned")])
def test_the_accuracy_says_why_rewards_are_equal(accuracy, name):
    hints = Hints()
    equal = {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "kl": 0.0, "grad_norm": 0.0}
    for _ in range(12):
        hints.update(HEALTHY | equal | {"rewards/accuracy/mean": accuracy})
    assert list(hints.verdict()) == [name]


def test_failing_tools_explain_equal_rewards():
    hints = Hints()
    failing = {"tools/failure_frequency": 1.0, "frac_reward_zero_std": 1.0, "kl": 0.0}
    for _ in range(12):
        hints.update(HEALTHY | failing)
    assert list(hints.verdict()) == ["failing tools"]


@pytest.mark.parametrize("value", [0.01, None, NAN])
def test_a_healthy_run_and_what_was_not_computed_give_no_hint(value):
    assert given("kl", [value] * 50) == []


def test_the_verdict_is_about_the_last_steps():
    hints = Hints()
    assert hints.verdict() == {} and hints.update({"step": 0, "eval/greedy_accuracy": 0.5}) == []
    wrong = HEALTHY | {"completions/clipped_ratio": 0.6, "kl": 2.0}
    assert hints.update(wrong) == [], "the mean of one step says little"
    assert list(hints.verdict()) == ["KL", "truncation"]
    for _ in range(20):
        hints.update(HEALTHY)
    assert hints.verdict() == {}


def test_rules_and_limits_are_those_of_the_document():
    table = (
        (ROOT / "docs" / "metrics.md")
        .read_text()
        .split("## Hints")[1]
        .split("## What is written")[0]
    )
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]
    expected = []
    for rule in HINT_RULES:
        limit = f"below {rule.below:g}" if rule.below > 0 else f"above {rule.above:g}"
        expected.append([rule.name, f"`{rule.metric}` {limit}"])
    assert rows == expected

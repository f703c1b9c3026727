"""Hints on made-up metrics: each is given at the right step, once, and not without cause."""

import pytest
from conftest import ROOT

from grpo.telemetry.hints import RULES, Hints

HEALTHY = {
    "kl": 0.01, "entropy": 1.0, "frac_reward_zero_std": 0.3, "completions/clipped_ratio": 0.05,
    "clip_ratio/region_mean": 0.01, "sampling/logprob_difference": 0.003, "tools/call_frequency": 0.5,
}  # fmt: skip


def hints_of(num_steps: int, name: str, value) -> list[tuple[int, str]]:
    """``(step, hint)`` of a run with ``HEALTHY`` metrics, apart from one, a function of the step."""
    hints, given = Hints(), []
    for step in range(1, num_steps + 1):
        given += [(step, hint) for hint in hints.update(line(step, name, value))]
    return given


def line(step: int, name: str, value) -> dict:
    return {"step": step, "reward": step / 200, **HEALTHY, name: value(step)}


def after(step, then, before):
    return lambda now: then if now > step else before


CASES = {
    # rule -> (metric, its value as a function of the step, step of the hint, words of the hint)
    "KL": ("kl", after(10, 0.8, 0.01), 17, "0.56 nats per token"),  # (3 * 0.01 + 7 * 0.8) / 10
    "entropy": ("entropy", after(30, 0.05, 1.0), 40, "from 1.000 to 0.050"),
    "equal rewards": ("frac_reward_zero_std", after(10, 0.99, 0.3), 18, "85% of the groups"),
    "no score": ("frac_unscorable", after(1, 1.0, 0.5), 11, "no completion of the last steps has a score"),
    "truncation": ("completions/clipped_ratio", lambda step: 0.5, 3, "50% of the completions"),
    "no calls": ("tools/call_frequency", after(2, 0.0, 0.5), 12, "nobody called the tool"),
    "clipping": ("clip_ratio/region_mean", lambda step: 0.4, 3, "40% of the tokens"),
    "log-prob difference": ("sampling/logprob_difference", lambda step: 0.2, 3, "differ by 0.200 nats"),
    "shared cores": ("time/frac_core_wait", after(3, 0.5, 0.0), 6, "25% of the time"),  # 3 * 0.5 / 6
}


@pytest.mark.parametrize("rule", CASES)
def test_a_hint_is_given_once_and_alone(rule):
    name, value, step, words = CASES[rule]
    ((at, hint),) = hints_of(60, name, value)
    assert at == step and words in hint


def test_a_short_run_gets_its_hints_at_the_third_step_and_in_the_verdict():
    hints = Hints()
    wrong = {"completions/clipped_ratio": 0.6, "frac_reward_zero_std": 1.0, "tools/call_frequency": 0.0}
    given = [hints.update({"step": step, "reward": 0.0, **HEALTHY, **wrong}) for step in range(1, 7)]
    assert [len(found) for found in given] == [0, 0, 3, 0, 0, 0]
    assert sorted(hints.verdict()) == ["equal rewards", "no calls", "truncation"]
    assert list(hints.verdict().values()) == given[2], "the same words"
    for step in range(7, 17):
        assert hints.update({"step": step, "reward": 0.0, **HEALTHY}) == []
    assert hints.verdict() == {}, "the verdict is about the last steps"


def test_a_verdict_needs_no_third_step():
    hints = Hints()
    assert hints.update({"step": 1, "reward": 0.5, "kl": 2.0}) == []
    assert list(hints.verdict()) == ["KL"]
    assert Hints().verdict() == {}


def test_what_was_not_computed_is_skipped():
    often_null = hints_of(12, "kl", lambda step: 9.0 if step in (2, 6) else None)
    assert [step for step, _ in often_null] == [3], "the mean is over the numbers that there are"
    assert hints_of(50, "kl", lambda step: None) == []
    assert hints_of(50, "kl", lambda step: float("nan")) == []
    # The entropy of the first ten steps was never computed: there is nothing to compare with.
    assert hints_of(50, "entropy", after(20, 0.001, None)) == []
    ((step, hint),) = hints_of(50, "entropy", lambda step: 1.0 if step == 5 else 0.01 if step > 20 else None)
    assert step == 21 and "from 1.000 to 0.010" in hint


def test_a_healthy_run_and_evaluations_get_no_hint():
    assert hints_of(100, "kl", lambda step: 0.01) == []
    assert Hints().update({"step": 0, "eval/greedy_accuracy": 0.5}) == []


def test_a_rule_can_be_left_out():
    hints = Hints(without=["equal rewards"])
    given = [hints.update({"step": step, "reward": 0.0, "frac_reward_zero_std": 1.0}) for step in range(20)]
    assert not any(given) and hints.verdict() == {}


def test_rules_and_limits_are_those_of_the_document():
    table = (ROOT / "docs" / "metrics.md").read_text().split("## Hints")[1].split("## What is written")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]
    assert [name for name, _ in rows] == [rule.name for rule in RULES]
    assert CASES.keys() == dict(rows).keys()
    for rule, (_, condition) in zip(RULES, rows, strict=True):
        assert condition.startswith(f"`{rule.metric}` "), rule.name
        words = condition.split()
        if "above" in words:
            limit = float(words[2])
            assert rule.applies(limit + 1e-6, 0.0) and not rule.applies(limit, 0.0), rule.name
        elif rule.name == "entropy":
            assert "below a tenth of its mean over the first ten steps" in condition
            assert rule.applies(0.0999, 1.0) and not rule.applies(0.1, 1.0)
        else:
            assert words[1:] == ["0"] and rule.applies(0.0, 0.0) and not rule.applies(0.01, 0.0), rule.name

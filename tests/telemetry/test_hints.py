"""Hints on made-up metrics: each is given at the right step, once, and not without cause."""

import pytest
from conftest import ROOT

from grpo.telemetry import hints as hints_module
from grpo.telemetry.hints import RULES, Hints

HEALTHY = {
    "kl": 0.01, "entropy": 1.0, "frac_reward_zero_std": 0.3, "completions/clipped_ratio": 0.05, "clip_ratio/region_mean": 0.01,
    "rewards/accuracy/mean": 0.5, "rewards/format/mean": 0.9, "sampling/logprob_difference": 0.003, "step_time": 10.0,
    "time/rollout": 6.0, "time/reward": 0.5,
}  # fmt: skip


def hints_of(num_steps: int, **series) -> list[tuple[int, str]]:
    """``(step, hint)`` of a run with ``HEALTHY`` metrics, apart from those given as functions of the step."""
    hints, given = Hints(), []
    for step in range(1, num_steps + 1):
        metrics = {"step": step, "reward": step / 200, **HEALTHY}
        metrics |= {name.replace("__", "/"): of(step) for name, of in series.items()}
        given += [(step, hint) for hint in hints.update(metrics)]
    return given


def after(step, then, before):
    return lambda now: then if now > step else before


CASES = {
    # rule -> (metrics as functions of the step, step of the hint, words of the hint)
    "KL": ({"kl": after(10, 0.8, 0.01)}, 14, "0.64 nats per token"),  # (0.01 + 4 * 0.8) / 5
    "entropy": ({"entropy": after(30, 0.05, 1.0)}, 35, "from 1.000 to 0.050"),
    "equal rewards": ({"frac_reward_zero_std": after(10, 0.99, 0.3)}, 25, "82% of the groups"),  # (5 * 0.3 + 15 * 0.99) / 20
    "truncation": ({"completions__clipped_ratio": lambda step: 0.5}, 20, "50% of the completions"),
    "clipping": ({"clip_ratio__region_mean": lambda step: 0.4}, 5, "40% of the tokens"),
    "flat reward": ({"reward": lambda step: 0.25 + (step % 2) / 100}, 100, "(0.255) is no higher than at the start (0.255)"),
    "format alone": ({"rewards__format__mean": lambda step: min(step / 50, 1.0)}, 40, "rose by 0.50 while accuracy moved by +0.00"),
    "log-prob difference": ({"sampling__logprob_difference": lambda step: 0.2}, 5, "differ by 0.200 nats"),
    "rollout time": ({"time__rollout": lambda step: 9.5}, 20, "95% of the time goes to sampling"),
    "reward time": ({"time__reward": lambda step: 4.0}, 20, "40% of the time goes to the reward"),
}  # fmt: skip


def test_every_rule_has_a_case():
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_hint_is_given_once_and_alone(rule):
    series, step, words = CASES[rule]
    hints = hints_of(150, **series)
    assert [at for at, _ in hints] == [step], hints
    assert words in hints[0][1]
    assert any(key in hints[0][1] for key in ("optim.", "algorithm.", "rollout.", "reward.", "runtime.", "eval/")), (
        "the hint tells what to do"
    )


def test_steps_without_any_unequal_rewards_give_the_hint_early():
    ((step, hint),) = hints_of(60, reward=lambda step: 0.1, frac_reward_zero_std=after(5, 1.0, 0.3))
    assert step == 15 and hint.startswith("10 steps in a row") and "weight decay" in hint
    ((step, hint),) = hints_of(
        60, reward=lambda step: 0.1, frac_reward_zero_std=lambda step: 0.99 if step % 10 == 0 else 1.0
    )
    assert step == 20 and "too easy" in hint, "never ten in a row"


def test_equal_rewards_after_a_rise_give_another_hint():
    equal = {"frac_reward_zero_std": lambda step: 0.9}
    ((step, hint),) = hints_of(60, reward=lambda step: 0.1 + (step % 2) / 100, **equal)
    assert step == 20 and "too easy" in hint
    late = {"frac_reward_zero_std": after(40, 0.95, 0.3)}
    ((step, hint),) = hints_of(80, reward=lambda step: min(step / 20, 1.0), **late)
    assert step == 56 and "nearly learned" in hint  # (4 * 0.3 + 16 * 0.95) / 20 = 0.82


def test_a_healthy_run_gets_no_hint():
    assert hints_of(300) == []


def test_a_run_that_has_learned_everything_gets_no_hint_about_a_flat_reward():
    assert hints_of(300, reward=lambda step: min(step / 20, 1.0) + (step % 3) / 100) == []


def test_steps_without_a_number_do_not_count():
    missing = {"kl": lambda step: None, "entropy": lambda step: float("nan")}
    assert hints_of(150, reward=lambda step: 0.1 if step > 3 else None, **missing) != []
    assert hints_of(50, kl=lambda step: 9.0 if step % 3 else None) == [], "never five numbers in a row"
    assert Hints().update({"step": 0, "eval/greedy_accuracy": 0.5}) == []


def test_short_steps_give_no_hint_about_time():
    assert hints_of(60, step_time=lambda step: 0.5, time__rollout=lambda step: 0.49) == []


def test_rules_and_thresholds_are_those_of_the_document():
    text = (ROOT / "docs" / "metrics.md").read_text()
    for rule in RULES:
        assert f"| {rule} |" in text, rule
    for name in (
        "MAX_KL", "MIN_ENTROPY_KEPT", "MAX_EQUAL_GROUPS", "ALL_EQUAL", "MAX_TRUNCATED", "MAX_CLIPPED", "FLAT_AFTER", "FORMAT_ROSE", "ACCURACY_ROSE",
        "MAX_LOGPROB_DIFFERENCE", "MAX_ROLLOUT_SHARE", "MAX_REWARD_SHARE",
    ):  # fmt: skip
        assert f"`{name}` {getattr(hints_module, name):g}" in text, name

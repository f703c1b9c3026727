"""Health hints on made-up metrics: said when they should be, once, and not otherwise."""

import pytest

from grpo.telemetry import hints as health
from grpo.telemetry.hints import SIGNS, Health

WELL = {
    "kl": 0.01, "entropy": 1.0, "frac_reward_zero_std": 0.3, "completions/clipped_ratio": 0.05, "clip_ratio/region_mean": 0.01,
    "rewards/accuracy/mean": 0.5, "rewards/format/mean": 0.9, "sampling/logprob_difference": 0.003, "step_time": 10.0,
    "time/rollout": 6.0, "time/reward": 0.5,
}  # fmt: skip


def said(number_of_steps: int, **series) -> list[tuple[int, str]]:
    """``(step, hint)`` over a run whose metrics are as ``WELL``, with functions of the step for what is not."""
    watcher, hints = Health(), []
    for step in range(1, number_of_steps + 1):
        metrics = {"step": step, "reward": step / 200, **WELL}
        metrics |= {name.replace("__", "/"): of(step) for name, of in series.items()}
        hints += [(step, hint) for hint in watcher.look(metrics)]
    return hints


def after(step, then, before):
    return lambda now: then if now > step else before


SICK = {
    # sign -> (metrics as functions of the step, the step at which it is said, words of the hint)
    "kl": ({"kl": after(10, 0.8, 0.01)}, 14, "0.64 nats per token"),  # (0.01 + 4 * 0.8) / 5
    "entropy": ({"entropy": after(30, 0.05, 1.0)}, 35, "from 1.000 to 0.050"),
    "equal groups": ({"frac_reward_zero_std": after(10, 0.99, 0.3)}, 25, "82% of the groups"),  # (5 * 0.3 + 15 * 0.99) / 20
    "truncation": ({"completions__clipped_ratio": lambda step: 0.5}, 20, "50% of the completions"),
    "clipping": ({"clip_ratio__region_mean": lambda step: 0.4}, 5, "40% of the tokens"),
    "flat reward": ({"reward": lambda step: 0.25 + (step % 2) / 100}, 100, "(0.255) is no higher than at the start (0.255)"),
    "format alone": ({"rewards__format__mean": lambda step: min(step / 50, 1.0)}, 40, "rose by 0.50 while accuracy moved by +0.00"),
    "scoring": ({"sampling__logprob_difference": lambda step: 0.2}, 5, "differ by 0.200 nats"),
    "rollout time": ({"time__rollout": lambda step: 9.5}, 20, "95% of the time goes to sampling"),
    "reward time": ({"time__reward": lambda step: 4.0}, 20, "40% of the time goes to the reward"),
}  # fmt: skip


def test_every_sign_has_its_case():
    assert set(SICK) == set(SIGNS)


@pytest.mark.parametrize("sign", SICK)
def test_a_sign_is_said_once_and_alone(sign):
    series, step, words = SICK[sign]
    hints = said(150, **series)
    assert [at for at, _ in hints] == [step], hints
    assert words in hints[0][1]
    assert any(key in hints[0][1] for key in ("optim.", "algorithm.", "rollout.", "reward.", "runtime.", "eval/")), (
        "what to do"
    )


def test_no_unequal_rewards_at_all_are_said_early_and_once():
    ((step, hint),) = said(60, reward=lambda step: 0.1, frac_reward_zero_std=after(5, 1.0, 0.3))
    assert step == 15 and hint.startswith("10 steps in a row") and "weight decay" in hint
    ((step, hint),) = said(
        60, reward=lambda step: 0.1, frac_reward_zero_std=lambda step: 0.99 if step % 10 == 0 else 1.0
    )
    assert step == 20 and "too easy" in hint, "never ten in a row"


def test_equal_rewards_after_a_rise_are_another_thing():
    equal = {"frac_reward_zero_std": lambda step: 0.9}
    ((step, hint),) = said(60, reward=lambda step: 0.1 + (step % 2) / 100, **equal)
    assert step == 20 and "too easy" in hint
    late = {"frac_reward_zero_std": after(40, 0.95, 0.3)}
    ((step, hint),) = said(80, reward=lambda step: min(step / 20, 1.0), **late)
    assert step == 56 and "nearly learned" in hint  # (4 * 0.3 + 16 * 0.95) / 20 = 0.82


def test_a_run_that_goes_well_is_left_alone():
    assert said(300) == []


def test_a_run_that_has_learned_all_there_is_is_not_called_flat():
    assert said(300, reward=lambda step: min(step / 20, 1.0) + (step % 3) / 100) == []


def test_steps_without_a_number_are_no_cause():
    assert (
        said(
            150, kl=lambda step: None, entropy=lambda step: float("nan"), reward=lambda step: 0.1 if step > 3 else None
        )
        != []
    )
    assert said(50, kl=lambda step: 9.0 if step % 3 else None) == [], "never five numbers in a row"
    assert Health().look({"step": 0, "eval/greedy_accuracy": 0.5}) == []


def test_fast_steps_are_not_worth_a_word_about_time():
    assert said(60, step_time=lambda step: 0.5, time__rollout=lambda step: 0.49) == []


def test_the_thresholds_are_those_of_the_document():
    from conftest import ROOT

    text = (ROOT / "docs" / "metrics.md").read_text()
    for name in (
        "MAX_KL", "MIN_ENTROPY_KEPT", "MAX_EQUAL_GROUPS", "ALL_EQUAL", "MAX_TRUNCATED", "MAX_CLIPPED", "FLAT_AFTER", "FORMAT_ROSE", "ACCURACY_ROSE",
        "MAX_LOGPROB_DIFFERENCE", "MAX_ROLLOUT_SHARE", "MAX_REWARD_SHARE",
    ):  # fmt: skip
        assert f"`{name}` {getattr(health, name):g}" in text, name

"""Rewards to advantages, with numbers worked by hand. Shapes: ``P`` problems, ``G`` completions of
each."""

import itertools
import math

import pytest
import torch

from grpo.algorithm.advantages import (
    call_user_advantages,
    group_advantages,
    has_equal_rewards,
    has_no_advantage,
    normalize_then_sum,
    weighted_sum,
)

NAN = math.nan
BASELINES = ("mean", "leave_one_out", "none")
SCALES = ("group", "batch", "mean", "none")
EVERY_PAIR = list(itertools.product(BASELINES, SCALES))


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def reference(rewards_PG, baseline, scale, eps):
    """The table of the algorithm as plain loops over Python floats; NaN rewards are dropped
    first."""

    def std(values):
        mean = math.fsum(values) / len(values)
        return (
            math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
            if len(values) > 1
            else 0.0
        )

    everything = [r for row in rewards_PG for r in row if not math.isnan(r)]
    result = []
    for row in rewards_PG:
        scored = [r for r in row if not math.isnan(r)]
        out = []
        for g, r in enumerate(row):
            if math.isnan(r):
                out.append(0.0)
                continue
            others = [other for h, other in enumerate(row) if h != g and not math.isnan(other)]
            if baseline != "none" and not others:
                out.append(0.0)  # nothing to compare with
                continue
            mean = math.fsum(scored) / len(scored)
            compared = everything if scale == "batch" else scored
            divisor = {"none": 1.0, "mean": mean + eps}.get(scale, std(compared) + eps)
            are_equal = scale in ("group", "batch") and len(set(compared)) == 1
            if are_equal or (baseline != "none" and len(set(scored)) == 1):
                out.append(0.0)
            elif baseline == "mean":
                out.append((r - mean) / divisor)
            elif baseline == "leave_one_out":
                out.append((r - math.fsum(others) / len(others)) / divisor)
            else:
                out.append(r / divisor)
        result.append(out)
    return result


# --- numbers worked by hand


def test_standard_deviations_by_hand():
    # [0, 1, 2, 5]: mean 2; squared deviations 4 + 1 + 0 + 9 = 14, over 3. [1, 1, 1, 5]: mean 2;
    # squared deviations 1 + 1 + 1 + 9 = 12, over 3. Both together: mean 2, std sqrt(26 / 7).
    rewards = double([0, 1, 2, 5], [1, 1, 1, 5])
    of_groups = double([math.sqrt(14 / 3)], [2.0])
    advantages = group_advantages(rewards, scale="group", eps=0.5)
    torch.testing.assert_close(advantages, (rewards - 2) / (of_groups + 0.5), rtol=1e-12, atol=0)
    of_batch = math.sqrt(26 / 7)
    advantages = group_advantages(rewards, scale="batch", eps=0.5)
    torch.testing.assert_close(advantages, (rewards - 2) / (of_batch + 0.5), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("baseline", "scale"), EVERY_PAIR)
def test_random_rewards_agree_with_plain_loops(baseline, scale):
    """Also rewards that are missing or equal, and a group of one that is scored."""
    generator = torch.Generator().manual_seed(1)
    for P, G in ((1, 2), (3, 4), (5, 9)):
        rewards = torch.rand(P, G, generator=generator, dtype=torch.float64)
        rewards[torch.rand(P, G, generator=generator) < 0.3] = NAN
        rewards[-1, : G // 2] = 0.7
        expected = double(*reference(rewards.tolist(), baseline, scale, 1e-4))
        advantages = group_advantages(rewards, baseline=baseline, scale=scale)
        torch.testing.assert_close(advantages, expected, rtol=1e-10, atol=1e-12)


def test_rewards_of_any_precision_and_unit():
    rewards = torch.tensor([[0.0, 1.0, 2.0, NAN]])
    expected = group_advantages(rewards, eps=0.0)
    for unit in (1e20, 1e37, 1e-30):
        torch.testing.assert_close(group_advantages(rewards * unit, eps=0.0), expected)
    assert torch.equal(group_advantages(rewards.bfloat16(), eps=0.0), expected)


# --- equal rewards


@pytest.mark.parametrize(
    ("baseline", "scale"),
    # Without a baseline too, nothing is divided by eps alone.
    [pair for pair in EVERY_PAIR if pair not in (("none", "mean"), ("none", "none"))],
)
def test_equal_rewards_give_exactly_0(baseline, scale):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for value in (0.0, 1.0, 0.1, 1 / 3, 1e-3, 12345.678):
            for G in (2, 3, 4097):
                rewards = torch.full((2, G), value, dtype=dtype)
                advantages = group_advantages(rewards, baseline=baseline, scale=scale)
                assert not advantages.any(), (dtype, value, G)


@pytest.mark.parametrize(("baseline", "scale"), EVERY_PAIR)
def test_groups_without_advantage_are_those_whose_advantages_are_0(baseline, scale):
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [NAN, NAN], [NAN, 0.5], [0.0, 1.0], [NAN, 0.0]])
    assert has_equal_rewards(rewards).tolist() == [True, True, True, True, False, True]
    advantages = group_advantages(rewards, baseline=baseline, scale=scale)
    found = has_no_advantage(rewards, baseline=baseline, scale=scale)
    assert found.tolist() == (advantages == 0).all(dim=1).tolist()


# --- MaxRL and GDPO


def test_the_mean_as_scale_by_hand():
    # Mean 1/4: (1 - 1/4) / (1/4) = 3 and -1; mean 3/4: 1/3 and -1: a solved hard problem counts
    # more than an easy one.
    advantages = group_advantages(
        double([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]), scale="mean", eps=0.0
    )
    expected = double([3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0])
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


def test_gdpo_by_hand():
    # Two functions, three groups of two, eps 0. Two unequal values become -+ 1 / sqrt 2 =: -+ a,
    # one alone 0. Sums with weights 1 and 2: -a + 2a, a - 2a; 0 + 2a, 0 - 2a; no value, 0. The five
    # that have a value have squares that add up to 10 a^2 = 5: std sqrt(5 / 4).
    first = double([0, 1], [3, NAN], [NAN, 0.1])
    second = double([100, 50], [7, 6], [NAN, 0.2])
    values_PGF = torch.stack([first, second], dim=-1)
    a = 0.5**0.5
    std = math.sqrt(5 / 4)
    advantages = normalize_then_sum(values_PGF, [1.0, 2.0], eps=0.0)
    torch.testing.assert_close(
        advantages, double([a / std, -a / std], [2 * a / std, -2 * a / std], [0, 0])
    )
    assert has_no_advantage(values_PGF, baseline="mean", scale="group").tolist() == [
        False,
        False,
        True,
    ]
    # One function alone is the advantage of its group, divided by the std of the batch.
    assert normalize_then_sum(values_PGF, [1.0, 0.0], eps=0.0)[1].tolist() == [0, 0]


def test_functions_that_cancel_each_other_out_have_no_advantage_under_gdpo():
    """The sums are 0 but for rounding, whose standard deviation must not become the unit of the
    advantages."""
    value_PG = torch.tensor([[0.0, 0.1, 0.2, 0.1], [0.3, 0.1, 0.1, 0.0], [0.1, 0.1, 0.1, 0.1]])
    values_PGF = torch.stack([value_PG, value_PG, 10 * value_PG + 3], dim=-1)
    for eps in (0.0, 1e-9):
        for weights in ([1.0, 1.0, -2.0], [0.1, 0.2, -0.3]):
            assert not normalize_then_sum(values_PGF, weights, eps=eps).any()
        advantages = normalize_then_sum(values_PGF, [1.0, 1.0, -1.0], eps=eps)
        assert advantages.abs().max() > 1
        assert not advantages[2].any(), (
            "nor has a group of equal values, whatever the mean of the batch is by rounding"
        )


def test_gdpo_compares_the_values_of_each_function_without_a_baseline_too():
    equal_GF = [[0.0, 2.0], [0.0, 2.0]]
    different_GF = [[0.0, 2.0], [0.0, 1.0]]
    values_PGF = torch.tensor([different_GF, equal_GF, different_GF])
    for options in ({"baseline": "mean", "scale": "group"}, {"baseline": "none", "scale": "none"}):
        assert has_no_advantage(values_PGF, **options).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([[1.0]], {}, "G >= 2 or baseline='none'"),
        ([[0.0, math.inf]], {}, "finite or NaN"),
        (
            [[1, NAN], [2, -0.5]],
            {"scale": "mean"},
            r"algorithm.scale=mean \(MaxRL\).*must not be negative, got -0.5",
        ),
    ],
)
def test_what_has_no_advantage_is_refused(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), **options)


def test_advantages_of_the_user():
    """They see rewards and the values of each function; a completion without a reward gets 0,
    whatever they give it."""
    values_PGF = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[NAN, NAN], [1.0, 1.0]]])
    rewards_PG = weighted_sum(values_PGF, [1.0, 0.5])

    def doubled_in_place(rewards, values):
        return rewards.mul_(2) + values[..., 1]

    advantages_PG, _ = call_user_advantages(doubled_in_place, rewards_PG, values_PGF, {})
    assert advantages_PG.tolist() == [[2.0, 4.0], [0.0, 4.0]]
    assert rewards_PG[0].tolist() == [1.0, 1.0], "works on a copy"
    for wrong, got in (
        (lambda rewards, values: rewards[:1], r"\(1, 2\)"),
        (lambda rewards, values: rewards / 0, "finite"),
    ):
        with pytest.raises(ValueError, match=f"algorithm.advantages must return .*{got}"):
            call_user_advantages(wrong, rewards_PG, values_PGF, {})

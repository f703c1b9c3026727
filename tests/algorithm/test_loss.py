"""The policy loss against numbers worked by hand and against plain Python loops. Shapes: ``B`` rows, ``T`` tokens."""

import itertools
import math

import pytest
import torch

from grpo.algorithm.loss import entropy_threshold, importance_ratio, loss_denominator, policy_loss
from grpo.distributed import World
from grpo.telemetry.accumulator import Accumulator

torch.set_num_threads(1)

OBJECTIVES = ("clip", "cispo", "sapo", "dppo_tv", "reinforce")
LEVELS = ("token", "sequence")
ESTIMATORS = ("k1", "k2", "k3")
AGGREGATIONS = ("response_mean", "token_mean", "constant")
NAN = math.nan


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


# --- an example worked by hand: 2 problems x 2 completions x 3 tokens; * marks padding
#
#   row   A    new             old             ratio           reference / new
#   0    +1    .6  .5  .2      .4  .5  .4      1.5  1    .5     1   1  2
#   1    -1    .6  .2   *      .4  .4   *      1.5   .5   *     .5  1  *
#   2    +2    .55  *   *      .5   *   *      1.1   *    *     1   *  *
#   3    -2    .25 .4  .18     .5  .2  .2       .5  2    .9     1   1  1

NEW = double([[0.6, 0.5, 0.2], [0.6, 0.2, NAN], [0.55, NAN, NAN], [0.25, 0.4, 0.18]]).log()
OLD = double([[0.4, 0.5, 0.4], [0.4, 0.4, NAN], [0.5, NAN, NAN], [0.5, 0.2, 0.2]]).log()
REF = double([[0.6, 0.5, 0.4], [0.3, 0.2, NAN], [0.55, NAN, NAN], [0.25, 0.4, 0.18]]).log()
A = double([1, -1, 2, -2])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
LN2 = 0.69314718055994531


def example(advantages_B=A, old_BT=OLD, **options):
    """Loss and gradient of the example, where padding holds NaN."""
    new_BT = NEW.clone().requires_grad_()
    loss_sum, stats = policy_loss(new_BT, old_BT, advantages_B, MASK, ref_logprobs_BT=REF, **options)
    (gradient_BT,) = torch.autograd.grad(loss_sum, new_BT)
    return loss_sum.item(), gradient_BT, stats


def correction_metrics(stats):
    """What the corrections of the example report."""
    metrics = Accumulator()
    metrics.add_all({name: pair for name, pair in stats.items() if name.startswith("sampling/")})
    return metrics.reduce(World(0, 1, 0, torch.device("cpu")))


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def test_importance_ratio_by_hand():
    ratio_BT = importance_ratio(NEW, OLD, MASK)
    assert ratio_BT[MASK].tolist() == close([1.5, 1, 0.5, 1.5, 0.5, 1.1, 0.5, 2, 0.9])
    ratio_BT = importance_ratio(NEW, OLD, MASK, "sequence")  # the geometric mean, at every token of the row
    assert ratio_BT[MASK].tolist() == close([0.75 ** (1 / 3)] * 3 + [0.75**0.5] * 2 + [1.1] + [0.9 ** (1 / 3)] * 3)
    for level in LEVELS:
        assert (importance_ratio(NEW, OLD, MASK, level)[~MASK] == 1).all(), "what a user's loss is promised"
    assert importance_ratio(OLD + 1000, OLD, MASK)[MASK].isfinite().all()


def test_clip_by_hand():
    # Row 0, A 1:  -min(1.5, 1.2) = -1.2    -1    -min(.5, .8) = -.5                        sum -2.7
    # Row 1, A -1: -min(-1.5, -1.2) = 1.5    -min(-.5, -.8) = .8                            sum  2.3
    # Row 2, A 2:  -2.2                                                                     sum -2.2
    # Row 3, A -2: -min(-1, -1.6) = 1.6    -min(-4, -2.4) = 4    1.8                        sum  7.4
    # d(-rho A)/d(lp) = -rho A where the unclipped branch is the smaller one, 0 where the clipped one is, 0 on padding.
    per_token = double([[0, -1, -0.5], [1.5, 0, 0], [-2.2, 0, 0], [0, 4, 1.8]])
    for aggregation, expected, divisor in (
        ("token_mean", 4.8, 1), ("constant", 4.8, 1),
        ("response_mean", -2.7 / 3 + 2.3 / 2 - 2.2 / 1 + 7.4 / 3, double([[3], [2], [1], [3]])),
    ):  # fmt: skip
        loss, gradient_BT, _ = example(aggregation=aggregation, max_length=5)
        assert loss == close(expected)
        torch.testing.assert_close(gradient_BT, per_token / divisor, rtol=1e-12, atol=0)


def test_epsilon_high_and_delta_by_hand():
    # Above 1.6 instead of 1.2: row 0's 1.5 is no longer clipped, -1.5 instead of -1.2.
    assert example(aggregation="token_mean", epsilon_high=0.6)[0] == close(4.8 - 0.3)
    # With A < 0, row 1's ratio of 1.5 and row 3's of 2 are capped at 1.4: 1.4 instead of 1.5, 2.8 instead of 4.
    loss, gradient_BT, _ = example(aggregation="token_mean", delta=1.4)
    assert loss == close(4.8 - 0.1 - 1.2)
    assert gradient_BT[1, 0] == 0 and gradient_BT[3, 1] == 0 and gradient_BT[3, 2] == close(1.8)


def test_cispo_by_hand():
    # Weights min(rho, 1.2), times -A lp, with lp = ln .6 = -.5108256, ln .5 = -.6931472, ln .2 = -1.6094379, ...
    # Row 0:  1.2 * .5108256 + .6931472 + .5 * 1.6094379 = 2.1108569
    # Row 1: -1.2 * .5108256 - .5 * 1.6094379 = -1.4177097
    # Row 2:  2 * 1.1 * .5978370 = 1.3152414
    # Row 3: -2 * (.5 * 1.3862944 + 1.2 * .9162907 + .9 * 1.7147984) = -6.6720291
    loss, gradient_BT, _ = example(objective="cispo", aggregation="token_mean")
    assert loss == pytest.approx(2.1108569 - 1.4177097 + 1.3152414 - 6.6720291, abs=1e-6)
    # The weight is a constant: the gradient is -weight * A and nothing of the ratio's own.
    expected = double([[-1.2, -1, -0.5], [1.2, 0.5, 0], [-2.2, 0, 0], [1, 2.4, 1.8]])
    torch.testing.assert_close(gradient_BT, expected, rtol=1e-12, atol=0)


def test_sequence_level_by_hand():
    # Geometric means: .75^(1/3) = .9085603, .75^(1/2) = .8660254, 1.1, .9^(1/3) = .9654894; clipped to [.95, 1.05]:
    # row 0: -.9085603; row 1: -min(-.8660254, -.95) = .95; row 2: -min(2.2, 2.1) = -2.1; row 3: 2 * .9654894, a token.
    options = dict(importance_level="sequence", epsilon=0.05)
    ratio_0, ratio_3 = 0.75 ** (1 / 3), 0.9 ** (1 / 3)
    loss, gradient_BT, stats = example(aggregation="response_mean", **options)
    assert loss == close(-ratio_0 + 0.95 - 2.1 + 2 * ratio_3) == pytest.approx(-0.1275815, abs=1e-7)
    # d(rho)/d(lp_t) = rho / |o| at each token: the gradient reaches all of a row, or, where clipped, none of it.
    expected = double([[-ratio_0 / 3] * 3, [0, 0, 0], [0, 0, 0], [2 * ratio_3 / 3] * 3])
    torch.testing.assert_close(gradient_BT, expected, rtol=1e-12, atol=0)
    assert example(aggregation="token_mean", **options)[0] == close(-3 * ratio_0 + 2 * 0.95 - 2.1 + 6 * ratio_3)
    assert stats["clip_ratio/low_mean"][0].item() == 2 and stats["clip_ratio/high_mean"][0].item() == 1
    # As weights of cispo, capped at 1.05 (row 2 only), the gradient is -weight * A at each token.
    _, gradient_BT, _ = example(aggregation="token_mean", objective="cispo", **options)
    expected = double([[-ratio_0] * 3, [0.75**0.5] * 2 + [0], [-2.1, 0, 0], [2 * ratio_3] * 3])
    torch.testing.assert_close(gradient_BT, expected, rtol=1e-12, atol=0)


# d = ln(ref / new): ln 2 at row 0's last token, -ln 2 at row 1's first, else 0.
@pytest.mark.parametrize(
    ("estimator", "up", "down", "gradient_up", "gradient_down"),
    [
        ("k1", -LN2, LN2, 1, 1),  # -d; d' = -1
        ("k2", LN2**2 / 2, LN2**2 / 2, -LN2, LN2),  # d^2 / 2
        ("k3", 1 - LN2, -0.5 + LN2, -1, 0.5),  # e^d - d - 1: 2 - ln 2 - 1 and 1/2 + ln 2 - 1
    ],
)
def test_kl_estimators_by_hand(estimator, up, down, gradient_up, gradient_down):
    options = dict(advantages_B=torch.zeros(4), beta=0.5, kl_estimator=estimator)
    loss, gradient_BT, stats = example(aggregation="token_mean", **options)
    assert loss == close(0.5 * (up + down))
    slope_elsewhere = 0.5 if estimator == "k1" else 0.0  # k1's slope is 1 everywhere
    expected = MASK.double() * slope_elsewhere
    expected[0, 2], expected[1, 0] = 0.5 * gradient_up, 0.5 * gradient_down
    torch.testing.assert_close(gradient_BT, expected, rtol=1e-9, atol=1e-12)
    assert example(aggregation="response_mean", **options)[0] == close(0.5 * (up / 3 + down / 2))
    assert stats["kl"][0].item() == pytest.approx(up + down, abs=1e-6) and stats["kl"][1].item() == 9


def test_unbiased_kl_by_hand():
    # k3 is 1 - ln 2 at row 0's last token, of ratio .5, and ln 2 - 1/2 at row 1's first, of ratio 1.5.
    options = dict(advantages_B=torch.zeros(4), beta=0.5, unbiased_kl=True)
    loss, gradient_BT, stats = example(aggregation="token_mean", **options)
    up, down = 0.5 * (1 - LN2), 1.5 * (LN2 - 0.5)
    assert loss == close(0.5 * (up + down)) and stats["kl"][0].item() == pytest.approx(up + down, abs=1e-6)
    # d(rho k3)/d(lp) = rho (k3 + 1 - e^d): at row 0 .5 (1 - ln 2 - 1), at row 1 1.5 (ln 2 - 1/2 + 1/2), elsewhere 0.
    expected = torch.zeros(4, 3, dtype=torch.float64)
    expected[0, 2], expected[1, 0] = 0.5 * -0.5 * LN2, 0.5 * 1.5 * LN2
    torch.testing.assert_close(gradient_BT, expected, rtol=1e-9, atol=1e-12)


def test_sapo_by_hand():
    # -4 / t sigmoid(t (rho - 1)) A, t = 1 where A > 0, else 2. rho - 1: .5 0 -.5 | .5 -.5 | .1 | -.5 1 -.1.
    def s(x):
        return 1 / (1 + math.exp(-x))

    options = dict(objective="sapo", sapo_temperature_neg=2.0)
    loss, gradient_BT, _ = example(aggregation="token_mean", **options)
    assert loss == close(-4 * (s(0.5) + 0.5 + s(-0.5)) + 2 * (s(1) + s(-1)) - 8 * s(0.1) + 4 * (s(-1) + s(2) + s(-0.2)))
    # d/d(lp) = -4 s (1 - s) rho A: at ratio 1 it is -A, as without a gate.
    assert gradient_BT[0, 1].item() == close(-1) and gradient_BT[3, 1].item() == close(4 * s(2) * s(-2) * 2 * 2)


def test_dppo_tv_by_hand():
    # new - old probability: .2 0 -.2 | .2 -.2 | .05 | -.25 .2 -.02. With bounds of .15 row 0's first token (A > 0,
    # rose), row 1's second (A < 0, fell) and row 3's first are cut; the others have weights min(rho, 20), as of cispo.
    options = dict(objective="dppo_tv", epsilon=0.15, aggregation="token_mean")
    loss, gradient_BT, stats = example(**options)
    expected = double([[0, -1, -0.5], [1.5, 0, 0], [-2.2, 0, 0], [0, 4, 1.8]])
    torch.testing.assert_close(gradient_BT, expected, rtol=1e-12, atol=0)
    assert loss == close((expected * NEW.nan_to_num()).sum().item())
    assert [stats[f"clip_ratio/{side}_mean"][0].item() for side in ("low", "high", "region")] == [2, 1, 3]
    weight_BT = example(objective="dppo_tv", epsilon=0.3, aggregation="token_mean")[1]  # wider: nothing is cut
    torch.testing.assert_close(weight_BT, double([[-1.5, -1, -0.5], [1.5, 0.5, 0], [-2.2, 0, 0], [1, 4, 1.8]]))
    _, gradient_BT, _ = example(old_BT=NEW - math.log(50), objective="dppo_tv", epsilon=2, aggregation="token_mean")
    assert gradient_BT[0].tolist() == close([-20, -20, -20]), "a ratio of 50 weighs as 20"


# Sampled with probabilities such that old / sampled is 2 .5 1 | 4 1 | .25 | 1 1 5; products 1, 4, .25, 5.
SAMPLED = OLD - double([[2, 0.5, 1], [4, 1, NAN], [0.25, NAN, NAN], [1, 1, 5]]).log()


@pytest.mark.parametrize(
    ("correction", "bounds", "weights", "cut"),
    [
        ("token_truncate", (0.5, 1.5), [[1.5, 0.5, 1], [1.5, 1, 0], [0.5, 0, 0], [1, 1, 1.5]], (4, 9)),
        ("token_mask", (0.5, None), [[2, 0.5, 1], [4, 1, 0], [0, 0, 0], [1, 1, 5]], (1, 9)),
        ("sequence_truncate", (0.5, 3.0), [[1, 1, 1], [3, 3, 0], [0.5, 0, 0], [3, 3, 3]], (3, 4)),
        ("sequence_mask", (None, 3.0), [[1, 1, 1], [0, 0, 0], [0.25, 0, 0], [0, 0, 0]], (2, 4)),
        # Geometric means 1, 2, 0.25 and 1.71.
        ("geometric_mask", (0.5, 1.9), [[1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1]], (2, 4)),
        ("geometric_mask", (0.99, 1.01), [[1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]], (3, 4)),
    ],
)
def test_sampler_correction_by_hand(correction, bounds, weights, cut):
    lowest, highest = bounds
    options = dict(sampler_correction=correction, sampler_correction_min=lowest, sampler_correction_max=highest)
    plain_BT = example(aggregation="token_mean")[1]
    _, gradient_BT, stats = example(aggregation="token_mean", sampling_logprobs_BT=SAMPLED, **options)
    torch.testing.assert_close(gradient_BT, plain_BT * double(weights), rtol=1e-9, atol=1e-12)
    counted_N = double(weights)[MASK] if correction.startswith("token") else double(weights)[:, 0]
    name = "sampling/importance_sampling_ratio"
    expected = {f"{name}/mean": counted_N.mean().item(), f"{name}/cut": cut[0] / cut[1]}
    assert correction_metrics(stats) == close(expected)
    of_kl = dict(advantages_B=torch.zeros(4), beta=0.5, aggregation="token_mean", sampling_logprobs_BT=SAMPLED)
    assert torch.equal(example(**of_kl)[1], example(**of_kl, **options)[1]), "the KL keeps its weight of 1"


def test_off_policy_sequence_mask_by_hand():
    # Mean of log(sampled / new): row 1, -ln(1.5 .5 4 1) / 2 < 0: kept; row 3, -ln(.5 2 .9 5) / 3 < 0: kept. With old
    # as sampled these are -ln(.75) / 2 = .1438 and -ln(.9) / 3 = .0351; rows 0 and 2 have positive advantages and stay.
    plain_BT = example(aggregation="token_mean")[1]
    for sampled, threshold, dropped in ((SAMPLED, 0.01, []), (OLD, 0.1, [1]), (OLD, 0.01, [1, 3]), (OLD, 0.2, [])):
        options = dict(sampling_logprobs_BT=sampled, off_policy_mask_threshold=threshold)
        _, gradient_BT, stats = example(aggregation="token_mean", **options)
        expected_BT = plain_BT.clone()
        expected_BT[dropped] = 0
        assert torch.equal(gradient_BT, expected_BT)
        assert correction_metrics(stats) == {"sampling/off_policy_masked": len(dropped) / 4}


def test_top_entropy_tokens_by_hand():
    entropies_N = double([0.1, 0.9, 0.4, 0.7, 0.2])
    assert entropy_threshold(entropies_N, 0.4).item() == close(0.4 + 0.4 * 0.3)  # rank .6 * 4 = 2.4 between .4 and .7
    for share in (0.05, 0.2, 0.5, 0.83, 1.0):
        values_N = torch.rand(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        torch.testing.assert_close(entropy_threshold(values_N, share), torch.quantile(values_N, 1 - share))
    assert entropy_threshold(torch.ones(0), 0.2).item() == math.inf
    many_N = torch.arange(2**24 + 1, dtype=torch.float32)  # more than torch.quantile takes
    assert entropy_threshold(many_N, 0.5).item() == 2**23
    plain_BT = example(aggregation="token_mean")[1]
    chosen_BT = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 1]]).bool()
    gradient_BT = example(aggregation="token_mean", policy_mask_BT=chosen_BT)[1]
    assert torch.equal(gradient_BT, plain_BT * chosen_BT)


def test_clip_ratios_by_hand():
    # Low: A < 0 below .8, rows 1 and 3. High: A > 0 above 1.2, row 0; rows 1 and 3 take the unclipped branch there.
    # The weight of cispo is capped above 1.2 whatever the sign: rows 0, 1, 3.
    for objective, expected in (("clip", [2, 1, 3]), ("cispo", [0, 3, 3]), ("reinforce", [0, 0, 0])):
        _, _, stats = example(objective=objective)
        assert [stats[f"clip_ratio/{side}_mean"][0].item() for side in ("low", "high", "region")] == expected
        assert stats["ratio"][0].item() == pytest.approx(1.5 + 1 + 0.5 + 1.5 + 0.5 + 1.1 + 0.5 + 2 + 0.9)
        assert not any(total.requires_grad or count.item() != 9 for total, count in stats.values())


def test_denominators_by_hand():
    row_gone = MASK & torch.tensor([[True], [False], [True], [True]])  # it is still a response
    for aggregation, of_all, without_a_row in (("response_mean", 4, 3), ("token_mean", 9, 7), ("constant", 20, 20)):
        assert loss_denominator(MASK, aggregation=aggregation, max_length=5).item() == of_all
        assert loss_denominator(row_gone.float(), aggregation=aggregation, max_length=5).item() == without_a_row
    for aggregation in ("response_mean", "token_mean"):
        nothing = loss_denominator(torch.zeros(2, 3), aggregation=aggregation)
        assert nothing.item() == 0 and nothing.dtype == torch.float32 and nothing.shape == ()


@pytest.mark.parametrize("level", LEVELS)
def test_ratio_1_gives_minus_the_advantage(level):
    logprobs = double([[-1, -2, -3], [-0.5, -0.1, -7], [-4, -1, -1]]).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    loss, stats = policy_loss(logprobs, logprobs.detach(), double([3, -4, 1]), mask, importance_level=level)
    assert loss.item() == 0  # the advantages sum to 0, and with them the value, whatever the log-probs ...
    (gradient_BT,) = torch.autograd.grad(loss, logprobs)
    expected = double([[-1, -1, -1], [2, 2, 0], [-1, 0, 0]])  # ... while the gradient, -A / |o|, does not
    torch.testing.assert_close(gradient_BT, expected, rtol=1e-12, atol=0)
    assert stats["ratio"][0].item() == 6 and stats["clip_ratio/region_mean"][0].item() == 0


def test_geometric_mask_agrees_with_plain_loops():
    new_BT, old_BT, advantages_B, mask_BT, _ = random_rows(3)
    sampled_BT = old_BT + 0.1 * new_BT.sin()
    options = dict(sampler_correction="geometric_mask", sampler_correction_min=0.95, sampler_correction_max=1.03)
    found, _ = policy_loss(new_BT, old_BT, advantages_B, mask_BT, sampling_logprobs_BT=sampled_BT, **options)
    total, kept = 0.0, 0
    for new, old, sampled, A, mask in zip(new_BT, old_BT, sampled_BT, advantages_B.tolist(), mask_BT, strict=True):
        live = mask.nonzero().flatten().tolist()
        product = math.prod(math.exp(old[t] - sampled[t]) for t in live)
        if live and 0.95 <= product ** (1 / len(live)) <= 1.03:
            kept += 1
            ratios = [math.exp(new[t] - old[t]) for t in live]
            total -= sum(min(r * A, min(max(r, 0.8), 1.2) * A) for r in ratios) / len(live)
    assert 0 < kept < 6 and found.item() == close(total)


def own_clip(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    """PPO's clipped loss as a user would write it."""
    return torch.max(-ratio_BT * A_B1, -ratio_BT.clamp(*bounds) * A_B1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_of_the_user_gets_the_tensors_of_the_built_in_ones(level):
    """The built-in loss written again gives its value and gradient, also with KL, corrections and averages."""
    options = dict(importance_level=level, beta=0.1, sampler_correction="sequence_mask", aggregation="token_mean")
    found, expected = (example(objective=o, sampling_logprobs_BT=SAMPLED, **options) for o in (own_clip, "clip"))
    assert torch.equal(found[1], expected[1]) and found[0] == expected[0]
    assert found[2] == expected[2], "the shares of tokens beyond the bounds too"

    def in_place(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
        logprobs_BT.zero_(), mask_BT.zero_(), A_B1.neg_()
        return torch.max(ratio_BT * A_B1, ratio_BT.clamp(*bounds) * A_B1)

    of_copies = example(objective=in_place, sampling_logprobs_BT=SAMPLED, **options)
    assert torch.equal(of_copies[1], expected[1]) and of_copies[2] == expected[2]
    constant = example(objective=lambda *tensors: torch.ones(4, 3).bfloat16())
    assert not constant[1].any() and constant[0] == 4, "a micro-batch without a gradient has one of 0"
    seen = []
    example(objective=lambda *tensors: seen.append(tensors) or own_clip(*tensors), epsilon=0.1, epsilon_high=0.3)
    logprobs_BT, ratio_BT, A_B1, mask_BT, bounds = seen[0]
    assert torch.equal(mask_BT, MASK) and torch.equal(A_B1[:, 0], A) and bounds == (0.9, 1.3)
    assert (logprobs_BT[~MASK] == 0).all() and (ratio_BT[~MASK] == 1).all(), "not the NaN of the padding"
    for wrong in (lambda *tensors: own_clip(*tensors).sum(dim=1), lambda *tensors: 1.0):
        with pytest.raises(ValueError, match=r"a loss of shape \[B, T\] = \(4, 3\), got (\(4,\)|float)"):
            example(objective=wrong)


# --- against plain loops


def reference(new, old, advantages, mask, ref, *, objective, level, low, high, delta, beta, kl, aggregation):
    """The same loss sum, one scalar at a time: nested lists of 0-d float64 tensors (``new``, with grad) and floats."""
    total = 0.0
    for b, tokens in enumerate(mask):
        live = [t for t, counts in enumerate(tokens) if counts]
        row = 0.0
        for t in live:
            compared = [t] if level == "token" else live
            rho = sum((new[b][s] - old[b][s]) / len(compared) for s in compared).exp()
            if objective == "clip":
                clipped = min(max(rho, 1 - low), 1 + high)
                free = rho if delta is None or rho.item() <= delta else delta
                loss = -min(free * advantages[b], clipped * advantages[b])
            elif objective == "cispo":
                loss = -min(rho.item(), 1 + high) * advantages[b] * new[b][t]
            elif objective == "sapo":
                temperature = 1.0 if advantages[b] > 0 else 1.05
                loss = -advantages[b] * 4 / temperature / (1 + (-temperature * (rho - 1)).exp())
            elif objective == "dppo_tv":
                change = math.exp(new[b][t].item()) - math.exp(old[b][t])
                keeps = change <= high if advantages[b] > 0 else change >= -low
                loss = -min(rho.item(), 20.0) * advantages[b] * new[b][t] * keeps
            else:
                loss = -advantages[b] * new[b][t]
            if kl is not None:
                d = ref[b][t] - new[b][t]
                loss = loss + beta * {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[kl]
            row = row + loss / (len(live) if aggregation == "response_mean" else 1)
        total = total + row
    return total


def random_rows(seed, B=8, T=5):
    """Rows of every length from 0 to T, one with a hole; ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old_BT = -noise(B, T).abs() - 0.1
    new_BT = old_BT + 0.4 * noise(B, T) + 0.4 * noise(B, 1)
    ref_BT = old_BT + 0.5 * noise(B, T)
    lengths_B = torch.tensor([T, 0, 1, 3, T, 2, 4, T])[:B]
    mask_BT = torch.arange(T) < lengths_B[:, None]
    mask_BT[4, 2] = False
    return new_BT, old_BT, noise(B), mask_BT, ref_BT


SEEDS = (145, 147)
"""Seeds whose rows reach every branch of the loss, clipped on both sides for advantages of both signs."""
SURROGATES = [  # objective, level, delta, epsilon_high: only bounds that the objective has
    *itertools.product(["clip"], LEVELS, (None, 1.5), (None, 0.3)),
    *itertools.product(["cispo"], LEVELS, [None], (None, 0.3)),
    *itertools.product(["dppo_tv"], ["token"], [None], (None, 0.3)),
    *itertools.product(["sapo"], LEVELS, [None], [None]),
    *itertools.product(["reinforce"], LEVELS, [None], [None]),
]
CASES = [  # every surrogate with every aggregation, and every KL estimator with every aggregation
    (*surrogate, aggregation, (None, *ESTIMATORS)[number % 4])
    for number, (surrogate, aggregation) in enumerate(itertools.product(SURROGATES, AGGREGATIONS))
]


@pytest.mark.parametrize(("objective", "level", "delta", "epsilon_high", "aggregation", "kl"), CASES)
def test_value_and_gradient_agree_with_plain_loops(objective, level, delta, epsilon_high, aggregation, kl):
    beta = 0.0 if kl is None else 0.3
    high = 0.2 if epsilon_high is None else epsilon_high
    for seed in SEEDS:
        new_BT, old_BT, A_B, mask_BT, ref_BT = random_rows(seed)
        scalars = [[value.clone().requires_grad_() for value in row] for row in new_BT]
        expected = reference(
            scalars, old_BT.tolist(), A_B.tolist(), mask_BT.tolist(), ref_BT.tolist(), objective=objective, level=level,
            low=0.2, high=high, delta=delta, beta=beta, kl=kl, aggregation=aggregation,
        )  # fmt: skip
        expected.backward()
        expected_BT = double([[0.0 if x.grad is None else x.grad.item() for x in row] for row in scalars])
        new_BT.requires_grad_()
        loss_sum, _ = policy_loss(
            new_BT, old_BT, A_B, mask_BT, ref_logprobs_BT=None if kl is None else ref_BT, objective=objective,
            importance_level=level, epsilon_high=epsilon_high, delta=delta, beta=beta, kl_estimator=kl or "k3",
            aggregation=aggregation, max_length=9,
        )  # fmt: skip
        (gradient_BT,) = torch.autograd.grad(loss_sum, new_BT)
        torch.testing.assert_close(loss_sum, expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(gradient_BT, expected_BT, rtol=1e-11, atol=1e-13)


# --- masked positions


@pytest.mark.parametrize("kl", [None, *ESTIMATORS])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_lies_under_the_mask_has_no_influence(objective, level, kl):
    new_BT, old_BT, A_B, mask_BT, ref_BT = random_rows(2)
    garbage = [NAN, math.inf, -math.inf, 1e300, -1e300, 0.0]
    results = []
    for value in [-1.0, *garbage]:
        new, old, ref = (torch.where(mask_BT, x, value) for x in (new_BT, old_BT, ref_BT))
        new.requires_grad_()
        options = dict(objective=objective, importance_level=level, beta=0.0 if kl is None else 0.1, delta=1.5)
        ref = None if kl is None else ref
        loss_sum, stats = policy_loss(new, old, A_B, mask_BT, ref_logprobs_BT=ref, kl_estimator=kl or "k3", **options)
        (gradient_BT,) = torch.autograd.grad(loss_sum, new)
        results.append([loss_sum.detach(), gradient_BT, *(part for pair in stats.values() for part in pair)])
        assert torch.equal(gradient_BT[~mask_BT], torch.zeros(int((~mask_BT).sum()), dtype=torch.float64))
        assert (gradient_BT[mask_BT] != 0).any()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masked_rows_add_nothing_and_have_a_graph(objective, level, aggregation):
    new_BT, old_BT, A_B, mask_BT, ref_BT = random_rows(3)
    assert not mask_BT[1].any()
    options = dict(objective=objective, importance_level=level, aggregation=aggregation, max_length=9, beta=0.1)
    new_BT.requires_grad_()
    loss_sum, _ = policy_loss(new_BT, old_BT, A_B, mask_BT, ref_logprobs_BT=ref_BT, **options)
    A_B[1] = NAN
    unchanged, _ = policy_loss(new_BT, old_BT, A_B, mask_BT, ref_logprobs_BT=ref_BT, **options)
    assert unchanged == loss_sum and not torch.autograd.grad(unchanged, new_BT)[0][1].any()
    nothing, stats = policy_loss(new_BT, old_BT, A_B, mask_BT & False, ref_logprobs_BT=ref_BT, **options)
    (gradient_BT,) = torch.autograd.grad(nothing, new_BT)  # every rank runs its backward
    assert nothing.item() == 0 and not gradient_BT.any()
    assert all(not total.any() and count.item() == 0 for total, count in stats.values())


# --- cutting the work


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_the_cut(aggregation, level, objective):
    """1x8, 2x4 and 8x1 rows, each part trimmed to its longest row, on one shared parameter."""
    _, old_BT, A_B, mask_BT, ref_BT = random_rows(4)
    A_B[2:4] = 0.0  # a group that teaches nothing
    generator = torch.Generator().manual_seed(5)
    ids_BT = torch.randint(11, mask_BT.shape, generator=generator)
    start_V = torch.randn(11, generator=generator, dtype=torch.float64)
    averaging = dict(aggregation=aggregation, max_length=7)

    def update(parts):
        logits_V = start_V.clone().requires_grad_()
        whole = loss_denominator(mask_BT, **averaging)
        losses = []
        for rows in parts:
            T = max(int((mask_BT[rows] * torch.arange(1, 6)).max()), 1)
            new_BT = logits_V.log_softmax(0)[ids_BT[rows, :T]]
            loss_sum, _ = policy_loss(
                new_BT, old_BT[rows, :T], A_B[rows], mask_BT[rows, :T], ref_logprobs_BT=ref_BT[rows, :T], beta=0.1,
                objective=objective, importance_level=level, **averaging,
            )  # fmt: skip
            (loss_sum / whole).backward()
            losses.append(loss_sum.item() / whole.item())
        return math.fsum(losses), logits_V.grad

    order = [6, 3, 0, 1, 7, 2, 5, 4]
    cuts = [[slice(0, 8)], [order[:4], order[4:]], [[b] for b in range(8)], [order[:1], order[1:6], order[6:]]]
    loss, gradient_V = update(cuts[0])
    for parts in cuts[1:]:
        other_loss, other_V = update(parts)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(other_V, gradient_V, rtol=1e-12, atol=1e-15)


# --- inputs and errors


def test_only_the_policy_gets_a_gradient():
    new_BT, old_BT, A_B, mask_BT, ref_BT = random_rows(7)
    for tensor in (new_BT, old_BT, A_B, ref_BT):
        tensor.requires_grad_()
    policy_loss(new_BT, old_BT, A_B, mask_BT, ref_logprobs_BT=ref_BT, beta=0.1)[0].backward()
    assert new_BT.grad.any() and old_BT.grad is None and A_B.grad is None and ref_BT.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(objective="ppo"), "objective='ppo'"),
        (dict(aggregation="constant"), "max_length"),
        (dict(beta=0.1), "beta=0.1 needs ref_logprobs_BT"),
        (dict(old_logprobs_BT=OLD[:3], mask_BT=MASK[:, :2]), r"old_logprobs \(3, 3\) mask \(4, 2\)"),
        (dict(advantages_B=A[:3]), "one advantage per row"),
    ],
)
def test_what_has_no_loss_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**dict(logprobs_BT=NEW, old_logprobs_BT=OLD, advantages_B=A, mask_BT=MASK) | change)

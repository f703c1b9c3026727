"""The policy loss against numbers worked by hand and against plain Python loops. Shapes: ``B``
rows, ``T`` tokens."""

import itertools
import math

import pytest
import torch

from grpo.algorithm.loss import entropy_threshold, loss_denominator, policy_loss

torch.set_num_threads(1)

OBJECTIVES = ("clip", "cispo", "sapo", "dppo_tv", "reinforce")
LEVELS = ("token", "sequence")
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
LN2 = math.log(2)


def example(advantages_B=A, old_BT=OLD, aggregation="token_mean", **options):
    """Loss and gradient of the example, where padding holds NaN."""
    new_BT = NEW.clone().requires_grad_()
    loss_sum, stats = policy_loss(
        new_BT,
        old_BT,
        advantages_B,
        MASK,
        ref_logprobs_BT=REF,
        aggregation=aggregation,
        **options,
    )
    (gradient_BT,) = torch.autograd.grad(loss_sum, new_BT)
    return loss_sum.item(), gradient_BT, stats


def totals(stats, *names):
    return [stats[name][0].item() for name in names]


CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def assert_close(found, expected):
    torch.testing.assert_close(found, double(expected), rtol=1e-9, atol=1e-12)


def test_clip_by_hand():
    # Row 0, A 1:  -min(1.5, 1.2) = -1.2    -1    -min(.5, .8) = -.5                        sum -2.7
    # Row 1, A -1: -min(-1.5, -1.2) = 1.5    -min(-.5, -.8) = .8                            sum  2.3
    # Row 2, A 2:  -2.2                                                                     sum -2.2
    # Row 3, A -2: -min(-1, -1.6) = 1.6    -min(-4, -2.4) = 4    1.8                        sum  7.4
    # d(-rho A)/d(lp) = -rho A where the unclipped branch is the smaller one, 0 where the clipped
    # one is, 0 on padding.
    per_token = double([[0, -1, -0.5], [1.5, 0, 0], [-2.2, 0, 0], [0, 4, 1.8]])
    loss, gradient_BT, stats = example()
    assert loss == close(4.8) == example(aggregation="constant", max_length=5)[0]
    assert_close(gradient_BT, per_token.tolist())
    # Low: A < 0 below .8, rows 1 and 3. High: A > 0 above 1.2, row 0; rows 1 and 3 take the
    # unclipped branch there.
    assert totals(stats, *CLIPPED) == [2, 1, 3]
    assert totals(stats, "ratio")[0] == pytest.approx(9.5)
    assert not any(total.requires_grad or count.item() != 9 for total, count in stats.values())

    loss, gradient_BT, _ = example(aggregation="response_mean")
    assert loss == close(-2.7 / 3 + 2.3 / 2 - 2.2 / 1 + 7.4 / 3)
    assert_close(gradient_BT, (per_token / double([[3], [2], [1], [3]])).tolist())
    # Above 1.6 instead of 1.2: row 0's 1.5 is no longer clipped, -1.5 instead of -1.2.
    assert example(epsilon_high=0.6)[0] == close(4.8 - 0.3)
    # With A < 0, row 1's ratio of 1.5 and row 3's of 2 are capped at 1.4: 1.4 instead of 1.5, 2.8
    # instead of 4.
    assert example(delta=1.4)[0] == close(4.8 - 0.1 - 1.2)


def test_cispo_by_hand():
    # The weight min(rho, 1.2) is a constant: the gradient is -weight * A and nothing of the ratio's
    # own. It is capped whatever the sign of A is: rows 0, 1, 3.
    _, gradient_BT, stats = example(objective="cispo")
    assert_close(gradient_BT, [[-1.2, -1, -0.5], [1.2, 0.5, 0], [-2.2, 0, 0], [1, 2.4, 1.8]])
    assert totals(stats, *CLIPPED) == [0, 3, 3]
    assert totals(example(objective="reinforce")[2], *CLIPPED) == [0, 0, 0]


def test_kl_by_hand():
    # d = ln(ref / new) is ln 2 at row 0's last token, of ratio .5, and -ln 2 at row 1's first, of
    # ratio 1.5; else 0. k3 = e^d - d - 1 is 1 - ln 2 and ln 2 - 1/2 there; its slope 1 - e^d is -1
    # and 1/2.
    loss, gradient_BT, stats = example(torch.zeros(4), beta=0.5)
    assert loss == close(0.5 * (1 - LN2 + LN2 - 0.5))
    assert_close(gradient_BT, [[0, 0, -0.5], [0.25, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert stats["kl"][0].item() == pytest.approx(0.5, abs=1e-6) and stats["kl"][1].item() == 9
    loss, gradient_BT, _ = example(torch.zeros(4), beta=0.5, unbiased_kl=True)
    assert loss == close(0.5 * (0.5 * (1 - LN2) + 1.5 * (LN2 - 0.5)))
    # d(rho k3)/d(lp) = rho (k3 + 1 - e^d): at row 0 .5 (1 - ln 2 - 1), at row 1 1.5 (ln 2 - 1/2 +
    # 1/2), elsewhere 0.
    slope = 0.5 * 1.5 * LN2
    assert_close(gradient_BT, [[0, 0, -0.25 * LN2], [slope, 0, 0], [0, 0, 0], [0, 0, 0]])


def test_dppo_tv_by_hand():
    # new - old probability: .2 0 -.2 | .2 -.2 | .05 | -.25 .2 -.02. With bounds of .15 row 0's
    # first token (A > 0, rose), row 1's second (A < 0, fell) and row 3's first are cut; the others
    # have weights min(rho, 20), as of cispo.
    _, gradient_BT, stats = example(objective="dppo_tv", epsilon=0.15)
    assert_close(gradient_BT, [[0, -1, -0.5], [1.5, 0, 0], [-2.2, 0, 0], [0, 4, 1.8]])
    assert totals(stats, *CLIPPED) == [2, 1, 3]
    _, gradient_BT, _ = example(old_BT=NEW - math.log(50), objective="dppo_tv", epsilon=2)
    assert gradient_BT[0].tolist() == close([-20, -20, -20]), "a ratio of 50 weighs as 20"


# Sampled with probabilities such that old / sampled is 2 .5 1 | 4 1 | .25 | 1 1 5; products 1, 4,
# .25, 5.
SAMPLED = OLD - double([[2, 0.5, 1], [4, 1, NAN], [0.25, NAN, NAN], [1, 1, 5]]).log()


@pytest.mark.parametrize(
    ("correction", "bounds", "weights", "num_cut"),
    [
        ("token_truncate", (0.5, 1.5), [[1.5, 0.5, 1], [1.5, 1, 0], [0.5, 0, 0], [1, 1, 1.5]], 4),
        ("token_mask", (0.5, None), [[2, 0.5, 1], [4, 1, 0], [0, 0, 0], [1, 1, 5]], 1),
        ("sequence_truncate", (0.5, 3.0), [[1, 1, 1], [3, 3, 0], [0.5, 0, 0], [3, 3, 3]], 3),
        ("sequence_mask", (None, 3.0), [[1, 1, 1], [0, 0, 0], [0.25, 0, 0], [0, 0, 0]], 2),
        # Geometric means 1, 2, 0.25 and 1.71.
        ("geometric_mask", (0.5, 1.9), [[1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1]], 2),
    ],
)
def test_sampler_correction_by_hand(correction, bounds, weights, num_cut):
    def corrected(**changes):
        return example(
            sampling_logprobs_BT=SAMPLED,
            sampler_correction=correction,
            sampler_correction_min=bounds[0],
            sampler_correction_max=bounds[1],
            **changes,
        )

    _, gradient_BT, stats = corrected()
    assert_close(gradient_BT, (example()[1] * double(weights)).tolist())
    counted_N = double(weights)[MASK] if correction.startswith("token") else double(weights)[:, 0]
    name = "sampling/importance_sampling_ratio"
    total, count = stats[f"{name}/mean"]
    assert (total.item(), count.item()) == (close(counted_N.sum().item()), len(counted_N))
    assert [number.item() for number in stats[f"{name}/cut"]] == [num_cut, len(counted_N)]
    of_kl = dict(advantages_B=torch.zeros(4), beta=0.5)
    assert torch.equal(example(**of_kl)[1], corrected(**of_kl)[1]), "the KL keeps its weight of 1"


def test_off_policy_sequence_mask_by_hand():
    # Mean of log(sampled / new): row 1, -ln(1.5 .5 4 1) / 2 < 0: kept; row 3, -ln(.5 2 .9 5) / 3 <
    # 0: kept. With old as sampled these are -ln(.75) / 2 = .1438 and -ln(.9) / 3 = .0351; rows 0
    # and 2 have positive advantages and stay.
    for sampled, threshold, dropped in (
        (SAMPLED, 0.01, []),
        (OLD, 0.1, [1]),
        (OLD, 0.01, [1, 3]),
        (OLD, 0.2, []),
    ):
        _, gradient_BT, stats = example(
            sampling_logprobs_BT=sampled, off_policy_mask_threshold=threshold
        )
        expected_BT = example()[1]
        expected_BT[dropped] = 0
        assert torch.equal(gradient_BT, expected_BT)
        assert [number.item() for number in stats["sampling/off_policy_masked"]] == [
            len(dropped),
            4,
        ]


def test_top_entropy_tokens_by_hand():
    entropies_N = double([0.1, 0.9, 0.4, 0.7, 0.2])
    # rank .6 * 4 = 2.4 between .4 and .7
    assert entropy_threshold(entropies_N, 0.4).item() == close(0.4 + 0.4 * 0.3)
    assert entropy_threshold(torch.ones(0), 0.2).item() == math.inf
    many_N = torch.arange(2**24 + 1, dtype=torch.float32)  # more than torch.quantile takes
    assert entropy_threshold(many_N, 0.5).item() == 2**23
    chosen_BT = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 1]]).bool()
    assert torch.equal(example(policy_mask_BT=chosen_BT)[1], example()[1] * chosen_BT)


@pytest.mark.parametrize(
    ("aggregation", "of_all", "without_a_row", "of_none"),
    [("response_mean", 4, 3, 0), ("token_mean", 9, 7, 0), ("constant", 20, 20, 20)],
)
def test_denominators_by_hand(aggregation, of_all, without_a_row, of_none):
    row_gone = MASK.float()
    row_gone[1] = 0
    for mask_BT, expected in (
        (MASK, of_all),
        (row_gone, without_a_row),
        (torch.zeros(4, 3), of_none),
    ):
        denominator = loss_denominator(mask_BT, aggregation=aggregation, max_length=5)
        assert denominator.dtype == torch.float32 and denominator.shape == ()
        assert denominator.item() == expected


def own_clip(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    """PPO's clipped loss as a user would write it; the tensors are copies, which it may change."""
    assert torch.equal(mask_BT, MASK)
    assert (logprobs_BT[~MASK] == 0).all()
    assert (ratio_BT[~MASK] == 1).all()
    logprobs_BT.zero_()
    mask_BT.zero_()
    A_B1.neg_()
    return torch.max(ratio_BT * A_B1, ratio_BT.clamp(*bounds) * A_B1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_of_the_user_gets_the_tensors_of_the_built_in_ones(level):
    """The built-in loss written again gives its value and gradient, also with KL, corrections and
    averages."""
    results = []
    for objective in (own_clip, "clip"):
        results.append(
            example(
                objective=objective,
                importance_level=level,
                epsilon=0.1,
                epsilon_high=0.3,
                beta=0.1,
                sampler_correction="sequence_mask",
                sampling_logprobs_BT=SAMPLED,
            )
        )
    found, expected = results
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]


def test_a_constant_loss_of_the_user_has_a_gradient_of_0():
    loss, gradient_BT, _ = example(objective=lambda *tensors: torch.ones(4, 3).bfloat16())
    assert loss == 9 and not gradient_BT.any()


# --- against plain loops


def reference(
    new, old, advantages, mask, ref, *, objective, level, high, delta, beta, kl, aggregation
):
    """The same loss sum, one scalar at a time: nested lists of 0-d float64 tensors (``new``, with
    grad) and floats."""
    total = 0.0
    for b, tokens in enumerate(mask):
        live = [t for t, counts in enumerate(tokens) if counts]
        row = 0.0
        for t in live:
            compared = [t] if level == "token" else live
            rho = sum((new[b][s] - old[b][s]) / len(compared) for s in compared).exp()
            if objective == "clip":
                clipped = min(max(rho, 0.8), 1 + high)
                free = rho if delta is None or rho.item() <= delta else delta
                loss = -min(free * advantages[b], clipped * advantages[b])
            elif objective == "cispo":
                loss = -min(rho.item(), 1 + high) * advantages[b] * new[b][t]
            elif objective == "sapo":
                temperature = 1.0 if advantages[b] > 0 else 1.05
                loss = -advantages[b] * 4 / temperature / (1 + (-temperature * (rho - 1)).exp())
            elif objective == "dppo_tv":
                change = math.exp(new[b][t].item()) - math.exp(old[b][t])
                keeps = change <= high if advantages[b] > 0 else change >= -0.2
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
    """Rows of every length from 0 to T, one with a hole; ratios on both sides of every bound.
    Outside the mask is NaN, and so is the advantage of the row without tokens."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old_BT = -noise(B, T).abs() - 0.1
    new_BT = old_BT + 0.4 * noise(B, T) + 0.4 * noise(B, 1)
    ref_BT = old_BT + 0.5 * noise(B, T)
    lengths_B = torch.tensor([T, 0, 1, 3, T, 2, 4, T])
    mask_BT = torch.arange(T) < lengths_B[:, None]
    mask_BT[4, 2] = False
    advantages_B = noise(B)
    advantages_B[1] = NAN
    for logprobs_BT in (new_BT, old_BT, ref_BT):
        logprobs_BT[~mask_BT] = NAN
    return new_BT, old_BT, advantages_B, mask_BT, ref_BT


SEEDS = (145, 147)
"""Seeds whose rows reach every branch of the loss, clipped on both sides for advantages of both
signs."""
SURROGATES = [  # objective, level, delta, epsilon_high: only bounds that the objective has
    *itertools.product(["clip"], LEVELS, (None, 1.5), (0.2, 0.3)),
    *itertools.product(["cispo"], LEVELS, [None], (0.2, 0.3)),
    *itertools.product(["dppo_tv"], ["token"], [None], (0.2, 0.3)),
    *itertools.product(["sapo", "reinforce"], LEVELS, [None], [0.2]),
]
KL = itertools.cycle([None, "k1", "k2", "k3"])


@pytest.mark.parametrize("seed", SEEDS)
def test_value_and_gradient_agree_with_plain_loops(seed):
    """Every surrogate with every aggregation, and every KL estimator with every aggregation."""
    new_BT, old_BT, A_B, mask_BT, ref_BT = random_rows(seed)
    for (objective, level, delta, high), aggregation in itertools.product(SURROGATES, AGGREGATIONS):
        kl = next(KL)
        beta = 0.0 if kl is None else 0.3
        scalars = []
        for row in new_BT:
            scalars.append([value.clone().requires_grad_() for value in row])
        expected = reference(
            scalars,
            old_BT.tolist(),
            A_B.tolist(),
            mask_BT.tolist(),
            ref_BT.tolist(),
            objective=objective,
            level=level,
            high=high,
            delta=delta,
            beta=beta,
            kl=kl,
            aggregation=aggregation,
        )
        expected.backward()
        gradients = []
        for row in scalars:
            gradients.append([0.0 if value.grad is None else value.grad.item() for value in row])
        found_BT = new_BT.clone().requires_grad_()
        loss_sum, _ = policy_loss(
            found_BT,
            old_BT,
            A_B,
            mask_BT,
            ref_logprobs_BT=None if kl is None else ref_BT,
            objective=objective,
            importance_level=level,
            epsilon_high=high,
            delta=delta,
            beta=beta,
            kl_estimator=kl or "k3",
            aggregation=aggregation,
            max_length=9,
        )
        (gradient_BT,) = torch.autograd.grad(loss_sum, found_BT)
        torch.testing.assert_close(loss_sum, expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(gradient_BT, double(gradients), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masked_rows_have_a_graph(objective):
    """Every rank runs its backward pass."""
    for aggregation in AGGREGATIONS:
        new_BT = NEW.clone().requires_grad_()
        nothing, stats = policy_loss(
            new_BT,
            OLD,
            A,
            MASK & False,
            ref_logprobs_BT=REF,
            objective=objective,
            aggregation=aggregation,
            max_length=9,
            beta=0.1,
        )
        nothing.backward()
        assert nothing.item() == 0 and not new_BT.grad.any()
        assert all(not total.any() and count.item() == 0 for total, count in stats.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": lambda *tensors: torch.ones(4)}, r"of shape \(4, 3\), got \(4,\)"),
        ({"objective": lambda *tensors: 1.0}, r"of shape \(4, 3\), got float"),
        ({"old_BT": OLD[:3]}, r"shape \(4, 3\), got \(3, 3\)"),
        ({"advantages_B": A[:3]}, "one advantage for each of 4 rows"),
    ],
)
def test_what_has_no_loss_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        example(**changes)

"""Advantages from rewards: by how much each completion was better than the others of its group.

    P   problems                          rewards_PG    one number per completion; NaN: not scored
    G   completions of each problem       values_PGF    the value of each reward function
    F   reward functions                  sums_1B       a batch as one group of B = P*G

A suffix of ``1`` is an axis of size 1, which broadcasts. All functions are pure, and compute at
least in fp32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.algorithm.choices import (
    Baseline,
    MultiObjectiveAggregation,
    Scale,
    check_choice,
    check_returned,
)
from grpo.algorithm.own import call_own, own_metrics

UserAdvantages = Callable[..., Tensor | tuple[Tensor, Mapping[str, Any]]]
"""A user's function ``fn(rewards_PG, values_PGF) -> advantages_PG``, or ``(advantages_PG,
metrics)``.

``rewards_PG`` has the total reward of each completion, ``values_PGF`` the value of each of F reward
functions. Both are in fp32, hold the groups of all ranks, and are NaN where there is no score. A
function that names them also gets ``lengths_PG``, the number of tokens that the model sampled
(int64), the values ``[P, G]`` of a reward function under its name, and columns of the rows, each as
a list of P values. Every rank calls the function with the same arguments, and must get the same
result."""

GDPO_ROUNDING_ERROR = 1e-5
"""Bound on the rounding error of a term in :func:`normalize_then_sum`, relative to the term."""
# A value has a relative rounding error of 2^-24, or 6e-8. Subtracting the mean and dividing by the
# standard deviation magnifies this error by |value| / std. 1e-5 allows for values that are 100
# times as large as their standard deviation.


def values_to_compare(
    values_PGF: Tensor,
    weights: Sequence[float],
    multi_objective_aggregation: MultiObjectiveAggregation,
) -> Tensor:
    """Return the numbers whose differences within a group determine the group's advantages.

    With ``sum_then_normalize``, these are the rewards ``[P, G]``. With ``normalize_then_sum``, they
    are the values ``[P, G, F]`` of the reward functions whose weight is not 0.
    """
    if multi_objective_aggregation == "normalize_then_sum":
        has_weight_F = torch.tensor(weights) != 0
        return values_PGF[..., has_weight_F]
    return weighted_sum(values_PGF, weights)


def weighted_sum(values_PGF: Tensor, weights: Sequence[float]) -> Tensor:
    """Rewards ``[P, G]``: the weighted sum of the reward functions' values.

        r_i = sum_f  weight_f * value_if        over the functions f that gave a value

    The reward is NaN (not scored) if no function of nonzero weight gave a value.
    """
    weights_F = torch.tensor(weights)
    terms_PGF = values_PGF.nan_to_num(0.0) * weights_F

    # A sum that could be a mere rounding error is set to 0. For example, 0.9 * 1 - 0.3 * 3 must not
    # be a negative reward, which would end a run with scale="mean". In fp32, 3 + F - 1 numbers are
    # rounded by at most half a unit in the last place (2^-24): the value, the weight, their
    # product, and the sum after each of F - 1 additions.
    F = len(weights_F)
    rounding_error = (3 + F - 1) * 2**-24
    return _sum_of_terms(terms_PGF, rounding_error, values_PGF, weights_F)


def group_advantages(
    rewards_PG: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: float = 1e-4,
) -> Tensor:
    """Advantage ``[P, G]`` of each completion over the other completions of its group.

        A_i = (r_i - b_i) / s       for the completions i = 1 .. G of a problem

        baseline         b_i                               scale     s
        mean             1/G sum_j r_j                     group     std(r_1 .. r_G) + eps
        leave_one_out    1/(G-1) sum_{j != i} r_j          batch     std(all rewards) + eps
        none             0                                 mean      1/G sum_j r_j + eps
                                                           none      1

        std(r_1 .. r_n) = sqrt( 1/(n-1) sum_j (r_j - mean)^2 )

    As baseline / scale: mean / group is GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1), mean /
    none Dr. GRPO (arXiv 2503.20783), mean / batch Lite PPO (arXiv 2508.08221), mean / mean MaxRL
    (arXiv 2602.02710), leave_one_out / none RLOO (arXiv 2402.14740).

    A difference from the papers: a completion without a score (NaN) gets advantage 0 and does not
    influence other completions. G in the formulas counts the scored completions.

    Args:
        rewards_PG: ``[P, G]`` rewards. ``scale="batch"`` needs the rewards of all ranks.
        baseline: name of b_i in the table.
        scale: name of s in the table. ``mean`` needs rewards that are not negative.
        eps: number added to s, in units of reward.

    Returns:
        ``[P, G]`` advantages, fp32 or wider. With a baseline or ``scale="group"``, a group of equal
        rewards has advantages of exactly 0. With ``scale="batch"``, a batch of equal rewards has
        advantages of exactly 0, too.

    Raises:
        ValueError: if the shape is not ``[P, G]``, a name is unknown, a reward is infinite, or a
            reward is negative with ``scale="mean"``; also for ``G == 1`` with a baseline, since a
            single completion has nothing to be compared with.
    """
    _check(rewards_PG, baseline, scale)
    # Half precision would round away the small differences that advantages are made of.
    dtype = torch.promote_types(rewards_PG.dtype, torch.float32)
    # In fp32 the squares of rewards above 1e19 would be infinite, and all advantages 0.
    rewards_PG = rewards_PG.double()
    # A completion without a score is NaN, which the sums and means of a group leave out.
    mean_P1 = rewards_PG.nanmean(dim=1, keepdim=True)

    # The baseline b takes the problem's difficulty out of the rewards. The mean of the other
    # completions does not depend on completion i. So subtracting that mean lowers the variance of
    # the gradient and keeps the expectation. The mean of the group contains r_i, and subtracting it
    # gives (G - 1) / G of the difference to the mean of the others.
    b_PG = torch.zeros_like(rewards_PG)
    if baseline == "mean":
        b_PG = mean_P1.expand_as(rewards_PG)
    elif baseline == "leave_one_out":
        sum_of_others_PG = rewards_PG.nansum(dim=1, keepdim=True) - rewards_PG
        b_PG = sum_of_others_PG / _num_others(rewards_PG)

    # The scale s makes problems count alike, whether their rewards differ much or little. Dr. GRPO
    # leaves s out, because s gives problems that are almost always or almost never solved more
    # weight.
    s_P1 = torch.ones_like(mean_P1)
    is_zero_PG = rewards_PG.isnan()
    if scale == "group":
        s_P1 = _std(rewards_PG) + eps
    elif scale == "batch":
        rewards_1B = rewards_PG.reshape(1, -1)
        s_P1 = _std(rewards_1B) + eps
        is_zero_PG |= _are_equal(rewards_1B)
    elif scale == "mean":
        s_P1 = mean_P1 + eps
        # Without eps, a group of rewards 0 would be 0 / 0.
        is_zero_PG |= mean_P1 == 0

    # Equal rewards must give exactly 0. The formula would give a rounding error divided by eps.
    if baseline != "none" or scale == "group":
        is_zero_PG |= _are_equal(rewards_PG)

    advantages_PG = (rewards_PG - b_PG) / s_P1
    advantages_PG = advantages_PG.masked_fill(is_zero_PG, 0.0)
    return advantages_PG.to(dtype)


def normalize_then_sum(
    values_PGF: Tensor,
    weights: Sequence[float],
    *,
    eps: float = 1e-4,
) -> Tensor:
    """Advantages ``[P, G]`` of GDPO (arXiv 2601.05242): reward functions are normalised one by one.

        S_i = sum_f  weight_f * (v_if - mean(v_f)) / (std(v_f) + eps)       over the group
        A_i = (S_i - mean(S)) / (std(S) + eps)                              over the batch

    In a sum of unnormalised values, a function with a wide spread would outweigh other functions.

    Args:
        values_PGF: ``[P, G, F]`` values of the reward functions for the groups of all ranks. A NaN
            does not influence other values.
        weights: the weight of each function.
        eps: added to each standard deviation.

    Returns:
        ``[P, G]`` advantages, fp32 or wider. They are exactly 0 for a completion that no function
        of nonzero weight has scored, for a group in which the values of each function are equal,
        and for a batch in which the functions cancel each other out.
    """
    weights_F = torch.tensor(weights, dtype=torch.double)
    normalized = [
        group_advantages(values_PG, eps=eps) for values_PG in values_PGF.double().unbind(dim=-1)
    ]
    terms_PGF = torch.stack(normalized, dim=-1) * weights_F

    # Functions that cancel each other out leave a rounding error. Divided by its standard deviation
    # below, this error would become advantages.
    sums_PG = _sum_of_terms(terms_PGF, GDPO_ROUNDING_ERROR, values_PGF, weights_F)

    # The batch is normalised as if it were one group.
    sums_1B = sums_PG.view(1, -1)
    advantages_1B = group_advantages(sums_1B, eps=eps)
    advantages_PG = advantages_1B.view(sums_PG.shape)

    # The mean of the batch is 0 except for a rounding error. A group of equal values would get this
    # error, divided by the standard deviation, as its advantages.
    is_zero_P = (terms_PGF == 0).flatten(1).all(dim=1)
    advantages_PG = advantages_PG.masked_fill(is_zero_P[:, None], 0.0)
    dtype = torch.promote_types(values_PGF.dtype, torch.float32)
    return advantages_PG.to(dtype)


def call_user_advantages(
    function: UserAdvantages,
    rewards_PG: Tensor,
    values_PGF: Tensor,
    by_name: dict[str, Any],
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the advantages ``[P, G]`` of a user's function in fp32, 0 where the reward is NaN, and
    its metrics as name -> (sum, count).

    Args:
        by_name: what the function gets if it names it.

    Raises:
        ValueError: if the function returns another shape, or a number that is not finite.
    """
    in_order = {"rewards_PG": rewards_PG, "values_PGF": values_PGF}
    advantages_PG, metrics = call_own(function, in_order, by_name)
    check_returned("algorithm.advantages", advantages_PG, rewards_PG.shape)
    advantages_PG = advantages_PG.detach().float()
    advantages_PG = advantages_PG.masked_fill(rewards_PG.isnan(), 0.0)
    is_finite_PG = advantages_PG.isfinite()
    is_wrong_P = ~is_finite_PG.all(dim=1)
    if is_wrong_P.any():
        raise ValueError(
            f"algorithm.advantages must return finite numbers, got "
            f"{advantages_PG[is_wrong_P][0].tolist()} for a group with the rewards "
            f"{rewards_PG[is_wrong_P][0].tolist()}: does it take a mean "
            "where a reward is NaN (None) and nanmean is needed, or over the problems (axis 0), or "
            "divide or take a logarithm without a small number added?"
        )
    return advantages_PG, own_metrics(metrics, is_finite_PG)


def has_equal_rewards(rewards_PG: Tensor) -> Tensor:
    """Return ``[P]``: True for each group whose scored rewards are equal or which has no score.

    ``rewards_PG`` may also be values ``[P, G, F]``. Then the values of each function must be equal.
    """
    return _are_equal(rewards_PG).flatten(1).all(dim=1)


def has_no_advantage(rewards_PG: Tensor, *, baseline: Baseline, scale: Scale) -> Tensor:
    """Return ``[P]``: True for each group whose advantages are 0 whatever the rewards of the other
    groups are.

    Dynamic sampling replaces these groups before the rewards of other ranks are known.
    ``rewards_PG`` may also be values ``[P, G, F]``, those of GDPO. It subtracts the mean of each
    function's values, whatever ``baseline`` and ``scale`` are.
    """
    # Without a baseline, advantages are multiples of rewards, not of differences. But with
    # scale="group", equal rewards have a standard deviation of 0, and get advantages of 0.
    if rewards_PG.dim() == 2 and baseline == "none" and scale != "group":
        return (rewards_PG.nan_to_num(0.0) == 0).all(dim=1)
    return has_equal_rewards(rewards_PG)


def _check(rewards_PG: Tensor, baseline: str, scale: str) -> None:
    """Raise ValueError for arguments that :func:`group_advantages` refuses."""
    if rewards_PG.dim() != 2:
        raise ValueError(f"expected rewards of shape [P, G], got {tuple(rewards_PG.shape)}")
    check_choice("baseline", baseline, Baseline)
    check_choice("scale", scale, Scale)
    if rewards_PG.shape[1] == 1 and baseline != "none":
        raise ValueError(
            f"baseline={baseline} compares a completion with itself: use G >= 2 or baseline='none'"
        )
    # The mean of an infinite reward would make the advantages of its whole group NaN.
    if rewards_PG.isinf().any():
        raise ValueError(f"rewards must be finite or NaN, got {rewards_PG.tolist()}")
    # A negative mean would flip the sign of all advantages of a group.
    if scale == "mean" and (rewards_PG < 0).any():
        raise ValueError(
            "algorithm.scale=mean (MaxRL) divides by the mean reward of a group, so rewards must "
            f"not be negative, got {rewards_PG.nan_to_num().min():g}: change the rewards or "
            "their weights, or take algorithm.scale=group"
        )


def _sum_of_terms(
    terms_PGF: Tensor,
    rounding_error: float,
    values_PGF: Tensor,
    weights_F: Tensor,
) -> Tensor:
    """Sum the terms ``[P, G, F]`` to ``[P, G]``; NaN where no function of nonzero weight gave a
    value.

    A sum that could be a mere rounding error is set to 0. ``rounding_error`` is the largest error
    of a term, relative to the term.
    """
    sums_PG = terms_PGF.sum(dim=-1)
    # Terms become errors before the sum, because the sum of large terms would overflow fp32.
    errors_PGF = terms_PGF.abs() * rounding_error
    is_rounding_PG = sums_PG.abs() <= errors_PGF.sum(dim=-1)
    sums_PG = sums_PG.masked_fill(is_rounding_PG, 0.0)

    is_missing_PGF = values_PGF.isnan() | (weights_F == 0)
    is_unscored_PG = is_missing_PGF.all(dim=-1)
    return sums_PG.masked_fill(is_unscored_PG, torch.nan)


def _are_equal(values_PG: Tensor) -> Tensor:
    """Return ``[P, 1]``: True where all scored values of a group are equal, or none is scored."""
    is_unscored_PG = values_PG.isnan()
    with_minus_inf_PG = values_PG.masked_fill(is_unscored_PG, -torch.inf)
    with_inf_PG = values_PG.masked_fill(is_unscored_PG, torch.inf)
    highest_P1 = with_minus_inf_PG.amax(dim=1, keepdim=True)
    lowest_P1 = with_inf_PG.amin(dim=1, keepdim=True)
    # `<=` and not `==`: without a scored value, the highest is -inf and the lowest is inf.
    return highest_P1 <= lowest_P1


def _num_others(values_PG: Tensor) -> Tensor:
    """Number ``[P, 1]`` of scored values of each group besides a completion's own, at least 1."""
    num_scored_P1 = values_PG.isfinite().sum(dim=1, keepdim=True)
    return (num_scored_P1 - 1).clamp(min=1)


def _std(values_PG: Tensor) -> Tensor:
    """Standard deviation ``[P, 1]`` (n - 1) of the scored values of each group."""
    deviations_PG = values_PG - values_PG.nanmean(dim=1, keepdim=True)
    squares_PG = deviations_PG**2
    # As the n deviations add up to 0, n - 1 of them are free. A single value has the deviation 0.
    variance_P1 = squares_PG.nansum(dim=1, keepdim=True) / _num_others(values_PG)
    return variance_P1.sqrt()

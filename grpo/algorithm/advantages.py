"""Advantages from rewards: by how much each completion was better than the others of its group.

    P   problems                          rewards_PG    one number per completion; NaN: not scored
    G   completions of each problem       values_PGF    what each reward function gave
    F   reward functions                  sums_1B       a batch as one group of B = P*G

A suffix of ``1`` is an axis of size 1, which broadcasts. All functions are pure, and compute at
least in fp32.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo.algorithm.choices import (
    Baseline,
    MultiObjectiveAggregation,
    Scale,
    check_choice,
    check_returned,
    equal_rewards_have_gradient,
)

UserAdvantages = Callable[[Tensor, Tensor], Tensor]
"""Advantages of a user's: ``fn(rewards_PG, values_PGF) -> advantages_PG``, the same result on all
ranks.

``rewards_PG`` and the values of each reward function are those of all ranks, fp32, and NaN where
there is no score."""
CANCELLED = 1e-5
"""In ``normalize_then_sum`` a sum below this share of its terms' absolute values is a rounding
error, counted as 0."""


def values_compared(
    values_PGF: Tensor,
    weights: Sequence[float],
    multi_objective_aggregation: MultiObjectiveAggregation = "sum_then_normalize",
) -> Tensor:
    """The numbers whose differences within a group give advantages.

    Returns:
        ``[P, G]`` rewards; with ``normalize_then_sum`` the ``[P, G, F]`` values of each function
        that has a weight.
    """
    if multi_objective_aggregation == "normalize_then_sum":
        has_weight_F = torch.tensor(weights) != 0
        return values_PGF[..., has_weight_F]
    return weighted_sum(values_PGF, weights)


def weighted_sum(values_PGF: Tensor, weights: Sequence[float]) -> Tensor:
    """``[P, G]`` weighted sum of the reward functions' values that are not NaN; NaN where all
    values with a weight are.

    A sum that is no larger than the rounding errors of its terms in fp32 is 0: 0.9 * 1 - 0.3 * 3 is
    no negative reward.
    """
    weights_F = torch.tensor(weights)
    terms_PGF = values_PGF.nan_to_num(0.0) * weights_F
    rewards_PG = terms_PGF.sum(dim=-1)

    # Half a unit in the last place (2^-24) each for the value, the weight and their product, and
    # for every addition.
    error_of_a_term = (len(weights_F) + 2) * 2**-24
    rounding_PG = (terms_PGF.abs() * error_of_a_term).sum(dim=-1)
    rewards_PG = rewards_PG.masked_fill(rewards_PG.abs() <= rounding_PG, 0.0)
    return rewards_PG.masked_fill(_is_unscored(values_PGF, weights_F), torch.nan)


def group_advantages(
    rewards_PG: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: float = 1e-4,
) -> Tensor:
    """The advantage of each completion: ``A = (reward - baseline) / scale``.

    GRPO (DeepSeekMath, section 4.1) subtracts the group's mean and divides by the group's standard
    deviation; Dr. GRPO does not divide; RLOO subtracts the mean of the group's other completions;
    MaxRL divides by the group's mean.

    Args:
        rewards_PG: ``[P, G]`` rewards, NaN for a completion that could not be scored. With
            ``scale="batch"`` those of all ranks, because one standard deviation over all of them is
            the divisor.
        baseline: ``mean`` of the group; ``leave_one_out``: mean of the group's other completions;
            ``none``: 0.
        scale: standard deviation (n - 1) of the ``group`` or the ``batch``, or the group's
            ``mean``; ``none``: 1.
        eps: added to the standard deviation or mean, in units of reward.

    Returns:
        ``[P, G]`` advantages, fp32 or wider. A completion that could not be scored gets 0 and does
        not influence the others. Where all rewards of a group (with ``scale="batch"``: of the
        batch) are equal, it is exactly 0.

    Raises:
        ValueError: if the shape is not ``[P, G]``, a reward is infinite, or negative with
            ``scale="mean"``, a name is unknown, or ``G == 1`` with a baseline (a group's only
            completion has nothing to be compared with).
    """
    _check(rewards_PG, baseline, scale)
    # At least fp32: half precision would round away the small differences that the advantages are
    # made of.
    dtype = torch.promote_types(rewards_PG.dtype, torch.float32)
    # In fp32 the squares of rewards above 1e19 would be infinite, and all their advantages 0.
    rewards_PG = rewards_PG.double()
    is_scored_PG = ~rewards_PG.isnan()
    rewards_PG = rewards_PG.masked_fill(~is_scored_PG, 0.0)
    is_zero_PG = ~is_scored_PG

    # Equal rewards must give exactly 0. Computed, they would give a rounding error divided by eps.
    if baseline != "none" or scale == "group":
        is_zero_PG = is_zero_PG | _all_equal(rewards_PG, is_scored_PG)

    # Only the difference teaches: a problem that is easy for the policy is no merit of a
    # completion.
    mean_P1 = _mean(rewards_PG, is_scored_PG)
    advantages_PG = rewards_PG
    if baseline == "mean":
        advantages_PG = rewards_PG - mean_P1
    elif baseline == "leave_one_out":
        sum_of_others_PG = rewards_PG.sum(dim=1, keepdim=True) - rewards_PG
        num_others_P1 = is_scored_PG.sum(dim=1, keepdim=True) - 1
        advantages_PG = rewards_PG - sum_of_others_PG / num_others_P1.clamp(min=1)

    # Dividing by the spread makes problems alike on which rewards differ much and little.
    if scale == "group":
        advantages_PG = advantages_PG / (_std(rewards_PG, is_scored_PG) + eps)
    elif scale == "batch":
        rewards_1B = rewards_PG.reshape(1, -1)
        is_scored_1B = is_scored_PG.reshape(1, -1)
        advantages_PG = advantages_PG / (_std(rewards_1B, is_scored_1B) + eps)
        is_zero_PG = is_zero_PG | _all_equal(rewards_1B, is_scored_1B)
    elif scale == "mean":
        advantages_PG = advantages_PG / (mean_P1 + eps)
        # Without eps it would be 0 / 0.
        is_zero_PG = is_zero_PG | (mean_P1 == 0)
    return advantages_PG.masked_fill(is_zero_PG, 0.0).to(dtype)


def normalize_then_sum(
    values_PGF: Tensor,
    weights: Sequence[float],
    *,
    eps: float = 1e-4,
) -> Tensor:
    """``[P, G]`` advantages of GDPO: reward functions are normalised one by one, so that a wide
    spread drowns no other.

    For each function ``(value - mean) / (std + eps)`` over the group, as by
    :func:`group_advantages`; their sum with ``weights``; then ``(sum - mean) / (std + eps)`` over
    the whole batch (GDPO, arXiv 2601.05242). A group whose values are equal in every function gets
    exactly 0, and so does a batch in which the functions cancel each other out.

    ``values_PGF`` are those of all ranks. A NaN does not influence the others; a completion without
    a value of any function with a weight gets 0.
    """
    # Each function alone, in units of its own spread.
    weights_F = torch.tensor(weights, dtype=torch.double)
    normalized = []
    for values_PG in values_PGF.double().unbind(dim=-1):
        normalized.append(group_advantages(values_PG, eps=eps))
    terms_PGF = torch.stack(normalized, dim=-1) * weights_F

    # Functions that cancel each other out leave a rounding error, which must not become the unit of
    # the advantages.
    sums_PG = terms_PGF.sum(dim=-1)
    rounding_PG = CANCELLED * terms_PGF.abs().sum(dim=-1)
    sums_PG = sums_PG.masked_fill(sums_PG.abs() <= rounding_PG, 0.0)
    sums_PG = sums_PG.masked_fill(_is_unscored(values_PGF, weights_F), torch.nan)

    # The sums are normalised over the whole batch, as one group.
    sums_1B = sums_PG.view(1, -1)
    advantages_PG = group_advantages(sums_1B, eps=eps).view(sums_PG.shape)
    teaches_P = terms_PGF.flatten(1).ne(0).any(dim=1)
    advantages_PG = advantages_PG.masked_fill(~teaches_P[:, None], 0.0)
    return advantages_PG.to(torch.promote_types(values_PGF.dtype, torch.float32))


def call_user_advantages(
    function: UserAdvantages, rewards_PG: Tensor, values_PGF: Tensor
) -> Tensor:
    """``[P, G]`` fp32, 0 where a completion has no reward; ValueError on another shape or infinite
    values."""
    advantages_PG = function(rewards_PG.clone(), values_PGF.clone())
    check_returned("algorithm.advantages", advantages_PG, rewards_PG.shape)
    advantages_PG = advantages_PG.detach().float().masked_fill(rewards_PG.isnan(), 0.0)
    if not advantages_PG.isfinite().all():
        raise ValueError(
            f"algorithm.advantages must return finite numbers, got {advantages_PG.tolist()}"
        )
    return advantages_PG


def has_equal_rewards(rewards_PG: Tensor) -> Tensor:
    """``[P]`` True where a group's rewards are equal, or none is a number; of ``[P, G, F]`` those
    of each function."""
    are_equal_P1 = _all_equal(rewards_PG, ~rewards_PG.isnan())
    return are_equal_P1.flatten(1).all(dim=1)


def has_no_advantage(rewards_PG: Tensor, *, baseline: Baseline, scale: Scale) -> Tensor:
    """``[P]`` True where all advantages of a group are 0, whatever the rewards of the other groups
    are.

    Those of equal rewards are, except that without a baseline an advantage is a multiple of its
    reward.
    """
    if equal_rewards_have_gradient(baseline, scale):
        return rewards_PG.nan_to_num(0.0).eq(0).all(dim=1)
    return has_equal_rewards(rewards_PG)


def _check(rewards_PG: Tensor, baseline: str, scale: str) -> None:
    if rewards_PG.dim() != 2:
        raise ValueError(f"expected rewards of shape [P, G], got {tuple(rewards_PG.shape)}")
    check_choice("baseline", baseline, Baseline)
    check_choice("scale", scale, Scale)
    if rewards_PG.shape[1] == 1 and baseline != "none":
        raise ValueError(
            f"baseline={baseline} compares a completion with itself: use G >= 2 or baseline='none'"
        )
    if rewards_PG.isinf().any():
        raise ValueError(f"rewards must be finite or NaN, got {rewards_PG.tolist()}")
    if scale == "mean" and (rewards_PG < 0).any():
        lowest = rewards_PG.nan_to_num().min().item()
        raise ValueError(
            "algorithm.scale=mean (MaxRL) divides by the mean reward of a group, so rewards must not be negative, "
            f"got {lowest:g}: change the rewards or their weights, or take algorithm.scale=group"
        )


def _is_unscored(values_PGF: Tensor, weights_F: Tensor) -> Tensor:
    """``[P, G]`` True where no function that has a weight gave a value."""
    is_missing_PGF = values_PGF.isnan() | (weights_F == 0)
    return is_missing_PGF.all(dim=-1)


def _all_equal(values_PG: Tensor, is_scored_PG: Tensor) -> Tensor:
    """``[P, 1]`` True where the scored values of a group are all equal or none is scored."""
    highest_P1 = values_PG.masked_fill(~is_scored_PG, -torch.inf).amax(dim=1, keepdim=True)
    lowest_P1 = values_PG.masked_fill(~is_scored_PG, torch.inf).amin(dim=1, keepdim=True)
    return highest_P1 <= lowest_P1


def _mean(values_PG: Tensor, is_scored_PG: Tensor) -> Tensor:
    """``[P, 1]`` mean of the scored values of each group; the others must be 0."""
    count_P1 = is_scored_PG.sum(dim=1, keepdim=True)
    return values_PG.sum(dim=1, keepdim=True) / count_P1.clamp(min=1)


def _std(values_PG: Tensor, is_scored_PG: Tensor) -> Tensor:
    """``[P, 1]`` standard deviation (n - 1) of the scored values of each group; the others must be
    0."""
    count_P1 = is_scored_PG.sum(dim=1, keepdim=True)
    squares_PG = (values_PG - _mean(values_PG, is_scored_PG)) ** 2
    sum_P1 = squares_PG.masked_fill(~is_scored_PG, 0.0).sum(dim=1, keepdim=True)
    return (sum_P1 / (count_P1 - 1).clamp(min=1)).sqrt()

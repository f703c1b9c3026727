"""Advantages from rewards. Pure functions. Shapes: ``P`` problems, ``G`` completions of each problem."""

import torch
from torch import Tensor

from grpo.choices import Baseline, Scale, check_choice, equal_rewards_have_gradient


def group_advantages(
    rewards_PG: Tensor, *, baseline: Baseline = "mean", scale: Scale = "group", eps: float = 1e-4
) -> Tensor:
    """The advantage of each completion: ``A = (reward - baseline) / scale``.

    GRPO (DeepSeekMath, section 4.1) subtracts the group's mean and divides by the group's standard deviation; Dr. GRPO does not
    divide; RLOO subtracts the mean of the other completions of the group.

    Args:
        rewards_PG: ``[P, G]`` rewards. NaN marks a completion that could not be scored. With ``scale="batch"`` these must be the
            problems of all ranks, because one standard deviation over all of them is the divisor.
        baseline: ``mean`` of the group; ``leave_one_out``: mean of the other completions of the group; ``none``: 0.
        scale: standard deviation (n - 1) of the ``group`` or of the whole ``batch``, plus ``eps``; ``none``: 1.
        eps: added to the standard deviation, in units of reward.

    Returns:
        ``[P, G]`` advantages, fp32 or wider. A completion that could not be scored gets 0 and does not influence the others. Where
        all rewards of a group (with ``scale="batch"``: of the batch) are equal, the advantage is exactly 0.

    Raises:
        ValueError: if the shape is not ``[P, G]``, a reward is infinite, a name is unknown, or ``G == 1`` with a baseline (the
            only completion of a group has nothing to be compared with).
    """
    _check(rewards_PG, baseline, scale)
    # At least fp32: half precision would round away the small differences between rewards that the advantages are made of.
    dtype = torch.promote_types(rewards_PG.dtype, torch.float32)
    # In fp32 the squares of rewards above 1e19 would be infinite, and all their advantages 0.
    rewards_PG = rewards_PG.double()
    scored_PG = ~torch.isnan(rewards_PG)
    rewards_PG = rewards_PG.masked_fill(~scored_PG, 0.0)

    advantages_PG = rewards_PG - _baseline(rewards_PG, scored_PG, baseline)
    is_zero_PG = ~scored_PG
    # Equal rewards must give exactly 0. Computed, they would give a rounding error divided by eps.
    if baseline != "none" or scale == "group":
        is_zero_PG = is_zero_PG | _all_equal(rewards_PG, scored_PG, dim=1)
    if scale == "group":
        advantages_PG = advantages_PG / (_std(rewards_PG, scored_PG, dim=1) + eps)
    elif scale == "batch":
        advantages_PG = advantages_PG / (_std(rewards_PG.flatten(), scored_PG.flatten(), dim=0) + eps)
        is_zero_PG = is_zero_PG | _all_equal(rewards_PG.flatten(), scored_PG.flatten(), dim=0)
    return advantages_PG.masked_fill(is_zero_PG, 0.0).to(dtype)


def has_equal_rewards(rewards_PG: Tensor) -> Tensor:
    """``[P]`` booleans: True where all rewards of a group are equal, or none is a number."""
    return _all_equal(rewards_PG, ~torch.isnan(rewards_PG), dim=1).squeeze(1)


def has_no_advantage(rewards_PG: Tensor, *, baseline: Baseline, scale: Scale) -> Tensor:
    """``[P]`` booleans: True where all advantages of a group are 0, whatever the rewards of the other groups are.

    Those of equal rewards are, except that without a baseline an advantage is a multiple of its reward.
    """
    has_zero_advantages_P = has_equal_rewards(rewards_PG)
    if equal_rewards_have_gradient(baseline, scale):
        has_zero_advantages_P = has_zero_advantages_P & (rewards_PG.nan_to_num(0.0) == 0).all(dim=1)
    return has_zero_advantages_P


def _check(rewards_PG: Tensor, baseline: str, scale: str) -> None:
    if rewards_PG.dim() != 2:
        raise ValueError(f"expected rewards of shape [P, G], got {tuple(rewards_PG.shape)}")
    check_choice("baseline", baseline, Baseline)
    check_choice("scale", scale, Scale)
    if rewards_PG.shape[1] == 1 and baseline != "none":
        raise ValueError(
            f"G = 1 with baseline={baseline!r} compares a completion with itself: use G >= 2 or baseline='none'"
        )
    if torch.isinf(rewards_PG).any():
        raise ValueError(f"rewards must be finite or NaN, got {rewards_PG.tolist()}")


def _baseline(rewards_PG: Tensor, scored_PG: Tensor, baseline: Baseline) -> Tensor | float:
    """The baseline that is subtracted from each reward; rewards that are not scored must be 0."""
    if baseline == "none":
        return 0.0
    count_P1, total_P1 = scored_PG.sum(dim=1, keepdim=True), rewards_PG.sum(dim=1, keepdim=True)
    if baseline == "mean":
        return total_P1 / count_P1.clamp(min=1)
    return (total_P1 - rewards_PG) / (count_P1 - 1).clamp(min=1)


def _all_equal(values: Tensor, scored: Tensor, dim: int) -> Tensor:
    """True where the scored values along ``dim`` are all equal or none is scored; ``dim`` remains with size 1."""
    highest = values.masked_fill(~scored, -torch.inf).amax(dim=dim, keepdim=True)
    lowest = values.masked_fill(~scored, torch.inf).amin(dim=dim, keepdim=True)
    return highest <= lowest


def _std(values: Tensor, scored: Tensor, dim: int) -> Tensor:
    """Standard deviation (n - 1) of the scored values along ``dim``, which remains with size 1; values that are not scored must be 0."""
    count = scored.sum(dim=dim, keepdim=True)
    mean = values.sum(dim=dim, keepdim=True) / count.clamp(min=1)
    squares = ((values - mean) ** 2).masked_fill(~scored, 0.0).sum(dim=dim, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()

"""Rewards to advantages. Pure functions.

Shapes: ``P`` problems, ``G`` completions of each.
"""

from typing import Literal

import torch

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]


def group_advantages(
    rewards_PG: torch.Tensor, *, baseline: Baseline = "mean", scale: Scale = "group", eps: float = 1e-4
) -> torch.Tensor:
    """``A = (r - baseline) / scale`` for each completion (DeepSeekMath, section 4.1; Dr. GRPO drops the scale; RLOO leaves one out).

    Args:
        rewards_PG: ``[P, G]`` rewards; NaN marks an unscorable completion. With ``scale="batch"``, P must be the whole
            global batch, since its std is what divides.
        baseline: ``mean`` of the group; ``leave_one_out``: mean of the other completions; ``none``: 0.
        scale: std (n-1) of the ``group`` or of the ``batch``, plus ``eps``; ``none``: 1.
        eps: Added to the std, in units of reward.

    Returns:
        ``[P, G]`` advantages, at least fp32. Unscorable completions get 0 and do not touch the others. Where the rewards that
        a baseline or a std is taken over are all equal, the advantage is exactly 0, not rounding noise divided by ``eps``.

    Raises:
        ValueError: on a shape other than ``[P, G]``, an infinite reward, an unknown name, or ``G == 1`` with a baseline
            (a completion compared with itself teaches nothing).
    """
    if rewards_PG.dim() != 2:
        raise ValueError(f"expected rewards of shape [P, G], got {tuple(rewards_PG.shape)}")
    if baseline not in ("mean", "leave_one_out", "none"):
        raise ValueError(f"baseline={baseline!r}: use mean, leave_one_out or none")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale={scale!r}: use group, batch or none")
    if rewards_PG.shape[1] == 1 and baseline != "none":
        raise ValueError(
            f"G = 1 with baseline={baseline!r} compares a completion with itself: use G >= 2 or baseline='none'"
        )
    # fp32 at least: rewards in half precision would round the differences that are the whole signal.
    rewards_PG = rewards_PG.to(torch.promote_types(rewards_PG.dtype, torch.float32))
    if torch.isinf(rewards_PG).any():
        raise ValueError(f"rewards must be finite or NaN, got {rewards_PG.tolist()}")
    scored_PG = ~torch.isnan(rewards_PG)
    r_PG = rewards_PG.masked_fill(~scored_PG, 0.0)
    n_P1 = scored_PG.sum(dim=1, keepdim=True)
    sum_P1 = r_PG.sum(dim=1, keepdim=True)

    if baseline == "mean":
        advantages_PG = r_PG - sum_P1 / n_P1.clamp(min=1)
    elif baseline == "leave_one_out":
        advantages_PG = r_PG - (sum_P1 - r_PG) / (n_P1 - 1).clamp(min=1)
    else:
        advantages_PG = r_PG
    if baseline != "none":
        advantages_PG = advantages_PG.masked_fill(_all_equal(rewards_PG, scored_PG, dim=1), 0.0)

    if scale == "group":
        std_P1 = _std(r_PG, scored_PG, dim=1)
        advantages_PG = (advantages_PG / (std_P1 + eps)).masked_fill(_all_equal(rewards_PG, scored_PG, dim=1), 0.0)
    elif scale == "batch":
        std = _std(r_PG.flatten(), scored_PG.flatten(), dim=0)
        equal = _all_equal(rewards_PG.flatten(), scored_PG.flatten(), dim=0)
        advantages_PG = (advantages_PG / (std + eps)).masked_fill(equal, 0.0)
    return advantages_PG.masked_fill(~scored_PG, 0.0)


def has_equal_rewards(rewards_PG: torch.Tensor) -> torch.Tensor:
    """``[P]`` booleans: the group's scorable rewards are all equal (or none is scorable), so it teaches nothing."""
    return _all_equal(rewards_PG, ~torch.isnan(rewards_PG), dim=1).squeeze(1)


def _all_equal(values: torch.Tensor, scored: torch.Tensor, dim: int) -> torch.Tensor:
    highest = values.masked_fill(~scored, -torch.inf).amax(dim=dim, keepdim=True)
    lowest = values.masked_fill(~scored, torch.inf).amin(dim=dim, keepdim=True)
    return highest <= lowest  # also when nothing is scored: -inf <= inf


def _std(values: torch.Tensor, scored: torch.Tensor, dim: int) -> torch.Tensor:
    n = scored.sum(dim=dim, keepdim=True)
    mean = values.sum(dim=dim, keepdim=True) / n.clamp(min=1)
    squares = ((values - mean) ** 2).masked_fill(~scored, 0.0).sum(dim=dim, keepdim=True)
    return (squares / (n - 1).clamp(min=1)).sqrt()

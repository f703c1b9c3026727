"""The loss of a token: one function per objective. Pure functions, without masks.

Shapes: ``B`` rows (completions), ``T`` completion tokens; ``A_B1`` is the advantage of each row, a constant.
"""

import torch
from torch import Tensor

from grpo.algorithm.choices import Objective, check_choice

Bounds = tuple[float, float]
"""Lowest and highest value that is not clipped: of the importance ratio, in ``dppo_tv`` of the change of a token's probability."""
MOST_DPPO_RATIO = 20.0
"""Upper bound of the importance ratio as a weight of ``dppo_tv``, as in the authors' code."""


def clip_bounds(objective: Objective, epsilon: float, epsilon_high: float) -> Bounds:
    """The bounds that an objective makes of the two epsilons."""
    if objective == "dppo_tv":
        return -epsilon, epsilon_high
    return 1 - epsilon, 1 + epsilon_high


def surrogate_loss(
    objective: Objective,
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    A_B1: Tensor,
    bounds: Bounds,
    delta: float | None = None,
    *,
    old_logprobs_BT: Tensor | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
) -> Tensor:
    """The loss of each token, ``[B, T]``, whose gradient is the policy gradient, by the function of the objective below.

    Args:
        bounds: see :func:`clip_bounds`; ``sapo`` and ``reinforce`` have none.
        delta: for ``clip`` alone.
        old_logprobs_BT: for ``dppo_tv`` alone.
        sapo_temperatures: for ``sapo`` alone, for positive and for other advantages.
    """
    check_choice("objective", objective, Objective)
    if objective == "clip":
        return clip_loss(ratio_BT, A_B1, bounds, delta)
    if objective == "cispo":
        return cispo_loss(logprobs_BT, ratio_BT, A_B1, bounds)
    if objective == "sapo":
        return sapo_loss(ratio_BT, A_B1, sapo_temperatures)
    if objective == "dppo_tv":
        return dppo_tv_loss(logprobs_BT, old_logprobs_BT, ratio_BT, A_B1, bounds)
    return reinforce_loss(logprobs_BT, A_B1)


def clip_loss(ratio_BT: Tensor, A_B1: Tensor, bounds: Bounds, delta: float | None = None) -> Tensor:
    """``-min(ratio * A, clip(ratio, lowest, highest) * A)``, the first ratio at most ``delta`` (PPO; GRPO, eq. 3)."""
    bounded_BT = ratio_BT if delta is None else ratio_BT.clamp(max=delta)
    return -torch.minimum(bounded_BT * A_B1, ratio_BT.clamp(*bounds) * A_B1)


def cispo_loss(logprobs_BT: Tensor, ratio_BT: Tensor, A_B1: Tensor, bounds: Bounds) -> Tensor:
    """``-min(ratio, highest) * A * logprob``, without gradient through the ratio (MiniMax-M1, eq. 4)."""
    return -ratio_BT.detach().clamp(max=bounds[1]) * A_B1 * logprobs_BT


def sapo_loss(ratio_BT: Tensor, A_B1: Tensor, temperatures: tuple[float, float]) -> Tensor:
    """``-sigmoid(t * (ratio - 1)) * 4 / t * A`` (SAPO): instead of a bound, a gradient that fades as the ratio leaves 1.

    ``t`` is the first temperature where A is positive, else the second. At ratio 1 the gradient is that of ``clip``.
    """
    t_B1 = torch.where(A_B1 > 0, *(A_B1.new_tensor(t) for t in temperatures))
    return -torch.sigmoid(t_B1 * (ratio_BT - 1)) * 4 / t_B1 * A_B1


def dppo_tv_loss(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, ratio_BT: Tensor, A_B1: Tensor, bounds: Bounds
) -> Tensor:
    """``-min(ratio, 20) * A * logprob``, without gradient through the ratio (DPPO, Binary-TV); 0 where :func:`clipped_tokens`.

    The bounds are on the change of the token's probability, a lower bound of the total variation between the two policies.
    """
    loss_BT = -ratio_BT.detach().clamp(max=MOST_DPPO_RATIO) * A_B1 * logprobs_BT
    is_low_BT, is_high_BT = clipped_tokens("dppo_tv", probability_change(logprobs_BT, old_logprobs_BT), A_B1, bounds)
    return loss_BT.masked_fill(is_low_BT | is_high_BT, 0.0)


def reinforce_loss(logprobs_BT: Tensor, A_B1: Tensor) -> Tensor:
    """``-A * logprob``."""
    return -A_B1 * logprobs_BT


def probability_change(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """``[B, T]`` probability of each token less its probability under the policy that sampled it; a constant."""
    return logprobs_BT.detach().exp() - old_logprobs_BT.detach().exp()


def clipped_tokens(objective: Objective, moved_BT: Tensor, A_B1: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Two boolean ``[B, T]``: tokens clipped at the lower bound, and tokens clipped at the upper bound.

    ``clip`` and ``dppo_tv``: where the policy gradient is 0, because the policy has moved far enough in the direction of the advantage.
    ``cispo``: where the weight is at its bound. The other objectives have no bound.

    Args:
        moved_BT: what is bounded: the importance ratio; in ``dppo_tv`` the :func:`probability_change`.
    """
    lowest, highest = bounds
    if objective in ("clip", "dppo_tv"):
        return (moved_BT < lowest) & (A_B1 < 0), (moved_BT > highest) & (A_B1 > 0)
    nowhere_BT = torch.zeros_like(moved_BT, dtype=torch.bool)
    if objective == "cispo":
        return nowhere_BT, (moved_BT > highest) & (A_B1 != 0)
    return nowhere_BT, nowhere_BT

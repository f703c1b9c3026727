"""The policy loss as a sum over completions, and the denominator that turns the sum into a mean. Pure functions.

Shapes: ``B`` rows (completions), ``T`` completion tokens.

The sum and its denominator are two functions because in a mean of means, tokens of a small micro-batch (or rank) would weigh more.
The caller adds up the denominator over the whole optimizer step and all ranks, then divides each micro-batch's sum by that number.
"""

import torch
from torch import Tensor

from grpo.choices import Aggregation, ImportanceLevel, KLEstimator, Objective, check_choice

Stats = dict[str, tuple[Tensor, Tensor]]
"""Name of a metric -> (sum over tokens, number of tokens)."""
Bounds = tuple[float, float]
"""Lowest and highest importance ratio that is not clipped."""


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    ref_logprobs_BT: Tensor | None = None,
    objective: Objective = "clip",
    importance_level: ImportanceLevel = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    aggregation: Aggregation = "response_mean",
    max_length: int | None = None,
) -> tuple[Tensor, Stats]:
    """The surrogate loss of every token plus ``beta`` times its KL to the reference, summed over rows.

    Args:
        logprobs_BT: ``[B, T]`` log-probabilities of the tokens under the policy being trained (nats, at the sampling temperature).
        old_logprobs_BT: ``[B, T]`` the same under the policy that sampled the tokens; a constant.
        advantages_B: ``[B]`` one advantage per completion.
        mask_BT: ``[B, T]`` True (or 1) at the tokens to train on. The values at other positions have no influence, even if NaN.
        ref_logprobs_BT: ``[B, T]`` the same under the frozen reference model; needed when ``beta > 0``.
        objective: ``clip`` (PPO; GRPO eq. 3), ``cispo`` (MiniMax-M1, eq. 4) or ``reinforce``; see :func:`surrogate_loss`.
        importance_level: one importance ratio per ``token``, or one per ``sequence``; see :func:`importance_ratio`.
        epsilon: importance ratios below ``1 - epsilon`` are clipped (``clip`` only).
        epsilon_high: importance ratios above ``1 + epsilon_high`` are clipped (DAPO's clip-higher); ``None``: above ``1 + epsilon``.
        delta: upper bound of the ratio where ``clip`` does not clip it, for negative advantages (INTELLECT-2); ``None``: no bound.
        beta: weight of the KL to the reference.
        kl_estimator: ``k1``, ``k2`` or ``k3``; see :func:`kl_estimate`.
        aggregation: with ``response_mean`` each row's loss is its mean over tokens, otherwise its sum.
        max_length: bound on the length of completions, in tokens; needed by ``constant``, for the denominator.

    Returns:
        ``loss_sum``: a scalar, to be divided by :func:`loss_denominator` added up over micro-batches and ranks.
        ``stats``: ``ratio``, ``clip_ratio/low_mean``, ``clip_ratio/high_mean``, ``clip_ratio/region_mean`` and, with a reference,
        ``kl``, each as (sum, count) over the tokens to train on, without gradient.

    Raises:
        ValueError: on an unknown name, disagreeing shapes, ``beta > 0`` without a reference, ``constant`` without ``max_length``.
    """
    _check_shapes(logprobs_BT, advantages_B, old_logprobs=old_logprobs_BT, mask=mask_BT, ref_logprobs=ref_logprobs_BT)
    _check_aggregation(aggregation, max_length)
    check_choice("objective", objective, Objective)
    check_choice("kl_estimator", kl_estimator, KLEstimator)
    if beta != 0 and ref_logprobs_BT is None:
        raise ValueError(f"beta={beta} needs ref_logprobs_BT")
    bounds = (1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    mask_BT = mask_BT.bool()
    A_B1 = advantages_B.detach().to(logprobs_BT.dtype)[:, None]
    ratio_BT = importance_ratio(logprobs_BT, old_logprobs_BT, mask_BT, importance_level)
    logprobs_BT = _zero_outside(mask_BT, logprobs_BT)

    loss_BT = surrogate_loss(objective, logprobs_BT, ratio_BT, A_B1, bounds, delta)
    if ref_logprobs_BT is not None:
        kl_BT = kl_estimate(logprobs_BT, _zero_outside(mask_BT, ref_logprobs_BT.detach()), kl_estimator)
        if beta != 0:
            loss_BT = loss_BT + beta * kl_BT
    loss_sum = _sum_over_rows(loss_BT, mask_BT, aggregation)

    with torch.no_grad():
        is_low_BT, is_high_BT = clipped_tokens(objective, ratio_BT, A_B1, bounds)
        values = {
            "ratio": ratio_BT,
            "clip_ratio/low_mean": is_low_BT,
            "clip_ratio/high_mean": is_high_BT,
            "clip_ratio/region_mean": is_low_BT | is_high_BT,
        }
        if ref_logprobs_BT is not None:
            values["kl"] = kl_BT
        count = mask_BT.sum().to(torch.float32)
        stats = {name: (_zero_outside(mask_BT, v_BT.to(torch.float32)).sum(), count) for name, v_BT in values.items()}
    return loss_sum, stats


def loss_denominator(
    mask_BT: Tensor, *, aggregation: Aggregation = "response_mean", max_length: int | None = None
) -> Tensor:
    """The divisor of :func:`policy_loss`'s sum, for these rows; the caller adds it up over micro-batches and ranks.

    ``response_mean``: the number of responses with at least one token to train on. ``token_mean``: the number of those tokens
    (DAPO, eq. 8). ``constant``: responses x ``max_length``, whatever their length (Dr. GRPO). A scalar in fp32 on the mask's device.
    """
    _check_aggregation(aggregation, max_length)
    mask_BT = mask_BT.bool()
    if aggregation == "response_mean":
        count = mask_BT.any(dim=1).sum()
    elif aggregation == "token_mean":
        count = mask_BT.sum()
    else:
        count = torch.tensor(mask_BT.shape[0] * max_length, device=mask_BT.device)
    return count.to(torch.float32)


def importance_ratio(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor, importance_level: ImportanceLevel = "token"
) -> Tensor:
    """``[B, T]`` probability of each token under the policy being trained, divided by that under the policy that sampled it.

    ``token``: ``exp(logprob - old_logprob)``. ``sequence``: the geometric mean of these over the response, the same at each of its
    tokens (GSPO, eq. 7); its gradient reaches every token of the response. Values outside of the mask mean nothing.
    """
    check_choice("importance_level", importance_level, ImportanceLevel)
    mask_BT = mask_BT.bool()
    log_ratio_BT = _zero_outside(mask_BT, logprobs_BT) - _zero_outside(mask_BT, old_logprobs_BT.detach())
    if importance_level == "sequence":
        lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(dim=1, keepdim=True) / lengths_B1).expand_as(log_ratio_BT)
    # exp() overflows fp32 at 88. An infinite ratio times 0 (a clipped branch, an advantage of 0) would be a NaN gradient.
    return log_ratio_BT.clamp(max=80.0).exp()


def surrogate_loss(
    objective: Objective,
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    A_B1: Tensor,
    bounds: Bounds,
    delta: float | None = None,
) -> Tensor:
    """The loss of each token, ``[B, T]``, whose gradient is the policy gradient.

    ``clip``: ``-min(ratio * A, clip(ratio, lowest, highest) * A)``, the first ratio at most ``delta``. ``cispo``:
    ``-min(ratio, highest) * A * logprob``, without gradient through the ratio. ``reinforce``: ``-A * logprob``.
    """
    lowest, highest = bounds
    if objective == "clip":
        bounded_BT = ratio_BT if delta is None else ratio_BT.clamp(max=delta)
        return -torch.minimum(bounded_BT * A_B1, ratio_BT.clamp(lowest, highest) * A_B1)
    if objective == "cispo":
        return -ratio_BT.detach().clamp(max=highest) * A_B1 * logprobs_BT
    return -A_B1 * logprobs_BT  # reinforce


def clipped_tokens(objective: Objective, ratio_BT: Tensor, A_B1: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Two boolean ``[B, T]``: tokens whose ratio is clipped at the lower bound, and tokens whose ratio is clipped at the upper bound.

    ``clip``: where the clipped term is the minimum, so that the policy gradient is 0. ``cispo``: where the weight is at its bound.
    """
    lowest, highest = bounds
    if objective == "clip":
        return (ratio_BT < lowest) & (A_B1 < 0), (ratio_BT > highest) & (A_B1 > 0)
    nowhere_BT = torch.zeros_like(ratio_BT, dtype=torch.bool)
    if objective == "cispo":
        return nowhere_BT, (ratio_BT > highest) & (A_B1 != 0)
    return nowhere_BT, nowhere_BT  # reinforce has no ratio


def kl_estimate(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, kl_estimator: KLEstimator) -> Tensor:
    """Estimate of the KL from policy to reference at each token, ``[B, T]``, in nats (Schulman, "Approximating KL Divergence", 2020).

    With ``d = ref_logprob - logprob``: ``k1`` is ``-d``, ``k2`` is ``d**2 / 2``, ``k3`` is ``exp(d) - d - 1``.
    """
    d_BT = ref_logprobs_BT - logprobs_BT
    if kl_estimator == "k3":
        return d_BT.exp() - d_BT - 1
    if kl_estimator == "k2":
        return d_BT**2 / 2
    return -d_BT  # k1


def _sum_over_rows(loss_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation) -> Tensor:
    loss_BT = _zero_outside(mask_BT, loss_BT)
    if aggregation == "response_mean":
        return (loss_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum()
    return loss_BT.sum()


def _zero_outside(mask_BT: Tensor, values_BT: Tensor) -> Tensor:
    """0 outside of the mask. Selects instead of multiplying, because NaN times 0 is NaN, in values and in gradients."""
    return torch.where(mask_BT, values_BT, 0.0)


def _check_shapes(logprobs_BT: Tensor, advantages_B: Tensor, **others_BT: Tensor | None) -> None:
    shape = logprobs_BT.shape
    if len(shape) != 2:
        raise ValueError(f"expected logprobs of shape [B, T], got {tuple(shape)}")
    for name, tensor in others_BT.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs have {tuple(shape)}")
    if advantages_B.shape != shape[:1]:
        raise ValueError(f"advantages have shape {tuple(advantages_B.shape)}, expected one per row: ({shape[0]},)")


def _check_aggregation(aggregation: Aggregation, max_length: int | None) -> None:
    check_choice("aggregation", aggregation, Aggregation)
    if aggregation == "constant" and not max_length:
        raise ValueError("aggregation='constant' divides by responses x max_length: give max_length in tokens")

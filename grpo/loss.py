"""The policy loss, as a sum, and the denominator that makes it a mean. Pure functions.

Shapes: ``B`` rows (completions), ``T`` completion tokens.

Sum and denominator are apart because an average over micro-batches or ranks of averages is not the average: the caller
counts the denominator over the whole optimizer step on all ranks first, then divides each micro-batch's sum by it.
"""

from typing import Literal

import torch

Objective = Literal["clip", "cispo", "reinforce"]
Aggregation = Literal["response_mean", "token_mean", "constant"]
Stats = dict[str, tuple[torch.Tensor, torch.Tensor]]

RATIO_EDGES = tuple(-0.01 + 0.02 * i for i in range(102))
"""Between the bins of the importance ratio's histogram: 1 is the middle of one, 2 and more is the last."""


def policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    ref_logprobs_BT: torch.Tensor | None = None,
    objective: Objective = "clip",
    importance_level: Literal["token", "sequence"] = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    aggregation: Aggregation = "response_mean",
    max_length: int | None = None,
) -> tuple[torch.Tensor, Stats]:
    """Sum of the per-token policy loss plus ``beta`` times the KL to the reference.

    Args:
        logprobs_BT: ``[B, T]`` log-probabilities under the policy being trained (nats, at the sampling temperature), with grad.
        old_logprobs_BT: ``[B, T]`` under the policy that sampled; a constant.
        advantages_B: ``[B]`` one advantage per completion.
        mask_BT: ``[B, T]`` True (or 1) at tokens that count. What the other positions hold, NaN included, has no influence.
        ref_logprobs_BT: ``[B, T]`` under the frozen reference; needed when ``beta > 0``.
        objective: ``clip`` (PPO; GRPO eq. 3), ``cispo`` (MiniMax-M1, eq. 4) or ``reinforce``.
        importance_level: ratio per ``token``, or the geometric mean over the ``sequence`` (GSPO, eq. 7), whose gradient flows
            through every token.
        epsilon: clip range below 1.
        epsilon_high: clip range above 1 (DAPO's clip-higher); ``epsilon`` if None.
        delta: cap on the ratio in the unclipped branch, so that a negative advantage cannot push without bound (INTELLECT-2).
        beta: weight of the KL term.
        kl_estimator: with ``d = ref - policy``: ``k3`` ``exp(d) - d - 1``, ``k2`` ``d**2 / 2``, ``k1`` ``-d`` (Schulman, 2020).
        aggregation: weight of each token in the sum; must match the denominator's.
        max_length: completion budget in tokens; needed for ``constant``.

    Returns:
        ``loss_sum``: scalar, to be divided by :func:`loss_denominator` summed over micro-batches and ranks.
        ``stats``: name -> ``(sum, count)`` over the masked tokens, without gradient.

    Raises:
        ValueError: on an unknown name, disagreeing shapes, ``beta > 0`` without a reference, ``constant`` without ``max_length``.
    """
    _check(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT, ref_logprobs_BT, beta)
    _check_aggregation(aggregation, max_length)
    if kl_estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"kl_estimator={kl_estimator!r}: use k1, k2 or k3")
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    mask_BT = mask_BT.bool()
    A_B1 = advantages_B.detach().to(logprobs_BT.dtype)[:, None]
    # Selecting before any arithmetic keeps whatever lies under the mask out of values and gradients (0 * nan is nan).
    lp_BT = torch.where(mask_BT, logprobs_BT, 0.0)
    log_ratio_BT = lp_BT - torch.where(mask_BT, old_logprobs_BT.detach(), 0.0)
    if importance_level == "sequence":
        lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(dim=1, keepdim=True) / lengths_B1).expand_as(log_ratio_BT)
    elif importance_level != "token":
        raise ValueError(f"importance_level={importance_level!r}: use token or sequence")
    # exp overflows fp32 at 88; an infinite ratio times 0 (a clipped branch, a zero advantage) would be a NaN gradient.
    rho_BT = log_ratio_BT.clamp(max=80.0).exp()

    if objective == "clip":
        unclipped_BT = rho_BT if delta is None else rho_BT.clamp(max=delta)
        clipped_BT = rho_BT.clamp(1 - epsilon, 1 + epsilon_high)
        loss_BT = -torch.minimum(unclipped_BT * A_B1, clipped_BT * A_B1)
    elif objective == "cispo":
        loss_BT = -rho_BT.detach().clamp(max=1 + epsilon_high) * A_B1 * lp_BT
    elif objective == "reinforce":
        loss_BT = -A_B1 * lp_BT
    else:
        raise ValueError(f"objective={objective!r}: use clip, cispo or reinforce")

    kl_BT = None
    if ref_logprobs_BT is not None:
        kl_BT = _kl(lp_BT, torch.where(mask_BT, ref_logprobs_BT.detach(), 0.0), kl_estimator)
        if beta != 0:
            loss_BT = loss_BT + beta * kl_BT

    loss_BT = torch.where(mask_BT, loss_BT, 0.0)
    if aggregation == "response_mean":
        loss_sum = (loss_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum()
    else:
        loss_sum = loss_BT.sum()
    with torch.no_grad():
        stats = _stats(rho_BT, A_B1, kl_BT, mask_BT, objective, epsilon, epsilon_high)
    return loss_sum, stats


def loss_denominator(
    mask_BT: torch.Tensor, *, aggregation: Aggregation = "response_mean", max_length: int | None = None
) -> torch.Tensor:
    """What :func:`policy_loss`'s sum is divided by, for these rows; add it up over micro-batches and ranks.

    ``response_mean``: responses with at least one token that counts. ``token_mean``: tokens that count (DAPO, eq. 8).
    ``constant``: responses x ``max_length``, whatever their length (Dr. GRPO).

    Returns:
        Scalar fp32 tensor on the mask's device; 0 if nothing counts.
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


def _kl(lp_BT: torch.Tensor, ref_BT: torch.Tensor, estimator: str) -> torch.Tensor:
    d_BT = ref_BT - lp_BT
    if estimator == "k3":
        return d_BT.exp() - d_BT - 1
    if estimator == "k2":
        return d_BT**2 / 2
    return -d_BT  # k1


def _stats(rho_BT, A_B1, kl_BT, mask_BT, objective, epsilon, epsilon_high) -> Stats:
    count = mask_BT.sum().to(torch.float32)
    none_BT = torch.zeros_like(mask_BT)
    if objective == "clip":  # where the clipped branch is the smaller one, so that the policy gradient is 0
        low_BT, high_BT = (rho_BT < 1 - epsilon) & (A_B1 < 0), (rho_BT > 1 + epsilon_high) & (A_B1 > 0)
    elif objective == "cispo":  # where the weight is capped
        low_BT, high_BT = none_BT, (rho_BT > 1 + epsilon_high) & (A_B1 != 0)
    else:
        low_BT, high_BT = none_BT, none_BT

    def over_tokens(values_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(mask_BT, values_BT.to(torch.float32), 0.0).sum(), count

    stats = {
        "ratio": over_tokens(rho_BT),
        "clip_ratio/low_mean": over_tokens(low_BT),
        "clip_ratio/high_mean": over_tokens(high_BT),
        "clip_ratio/region_mean": over_tokens(low_BT | high_BT),
    }
    if kl_BT is not None:
        stats["kl"] = over_tokens(kl_BT)
    edges_E = torch.tensor(RATIO_EDGES, dtype=rho_BT.dtype, device=rho_BT.device)
    sorted_N = torch.where(mask_BT, rho_BT.clamp(max=2.0), torch.inf).flatten().sort().values
    stats["ratio_histogram"] = (
        torch.searchsorted(sorted_N, edges_E).diff(),
        count,
    )  # no wait for the device, as histc has
    return stats


def _check(logprobs_BT, old_BT, advantages_B, mask_BT, ref_BT, beta) -> None:
    shape = logprobs_BT.shape
    if len(shape) != 2:
        raise ValueError(f"expected logprobs of shape [B, T], got {tuple(shape)}")
    for name, tensor in (("old_logprobs", old_BT), ("mask", mask_BT), ("ref_logprobs", ref_BT)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs have {tuple(shape)}")
    if advantages_B.shape != shape[:1]:
        raise ValueError(f"advantages have shape {tuple(advantages_B.shape)}, expected one per row: ({shape[0]},)")
    if beta != 0 and ref_BT is None:
        raise ValueError(f"beta={beta} needs ref_logprobs_BT")


def _check_aggregation(aggregation: str, max_length: int | None) -> None:
    if aggregation not in ("response_mean", "token_mean", "constant"):
        raise ValueError(f"aggregation={aggregation!r}: use response_mean, token_mean or constant")
    if aggregation == "constant" and not max_length:
        raise ValueError("aggregation='constant' divides by responses x max_length: give max_length in tokens")

"""The policy loss as a sum over completions, and the denominator that turns the sum into a mean.

    B   rows, one completion each         A_B1        advantage of each row, a constant
    T   tokens of the longest one         ratio_BT    probability now over probability when sampled
                                          mask_BT     True at the tokens that are trained on

The sum and its denominator are two functions because in a mean of means, tokens of a small
micro-batch (or rank) would weigh more. The caller adds up the denominator over the whole optimizer
step and all ranks, then divides each micro-batch's sum by that number. All functions are pure.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from grpo.algorithm.choices import (
    Aggregation,
    ImportanceLevel,
    KLEstimator,
    Objective,
    SamplerCorrection,
    check_choice,
    check_returned,
)

Bounds = tuple[float, float]
"""Least and greatest value that is not clipped: of the importance ratio; ``dppo_tv``: of the change
of probability."""
UserObjective = Callable[[Tensor, Tensor, Tensor, Tensor, Bounds], Tensor]
"""A loss of a user's: ``fn(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds) -> loss_BT``, the loss of
each token.

Log-probs have a gradient, and so has the importance ratio; outside of the mask they are 0 and 1,
and the loss counts as 0 there. ``bounds``: ``(1 - epsilon, 1 + epsilon_high)``."""
MOST_DPPO_RATIO = 20.0
"""Upper bound of the importance ratio as a weight of ``dppo_tv``, as in the authors' code."""


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    ref_logprobs_BT: Tensor | None = None,
    objective: Objective | UserObjective = "clip",
    importance_level: ImportanceLevel = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    unbiased_kl: bool = False,
    aggregation: Aggregation = "response_mean",
    max_length: float | None = None,
    policy_mask_BT: Tensor | None = None,
    sampling_logprobs_BT: Tensor | None = None,
    sampler_correction: SamplerCorrection = "none",
    sampler_correction_min: float | None = None,
    sampler_correction_max: float | None = 3.0,
    off_policy_mask_threshold: float | None = None,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The surrogate loss of every token, times its weights, plus ``beta`` times its KL to the
    reference, over all rows.

    Args:
        logprobs_BT: ``[B, T]`` log-probabilities of the tokens under the policy that is trained, in
            nats, at the sampling temperature.
        old_logprobs_BT: ``[B, T]`` the same under the policy that sampled, a constant; for
            ``dppo_tv`` the sampler's.
        advantages_B: ``[B]`` one advantage per completion.
        mask_BT: ``[B, T]`` True (or 1) at the tokens to train on. Values elsewhere have no
            influence, even if NaN.
        ref_logprobs_BT: ``[B, T]`` the same under the frozen reference; needed when ``beta > 0``.
        objective: the loss of a token, see :func:`surrogate_loss`; or a function,
            :data:`UserObjective`.
        importance_level: one ratio per ``token``, or one per ``sequence``; see
            :func:`importance_ratio`.
        epsilon: ratios below ``1 - epsilon`` are clipped (``clip``); probabilities that fell by
            more (``dppo_tv``).
        epsilon_high: ratios above ``1 + epsilon_high`` are clipped (DAPO's clip-higher); ``None``:
            ``epsilon``.
        delta: upper bound of the ratio where ``clip`` does not clip it, for negative advantages
            (INTELLECT-2).
        sapo_temperature_pos, sapo_temperature_neg: of ``sapo``, for positive and for other
            advantages.
        beta: weight of the KL to the reference.
        kl_estimator: ``k1``, ``k2`` or ``k3``; see :func:`kl_estimate`.
        unbiased_kl: multiply each token's KL by its ratio, with gradient through both
            (DeepSeek-V3.2).
        aggregation: with ``response_mean`` each row's loss is its mean over tokens, otherwise its
            sum.
        max_length: tokens that ``constant`` counts for each completion in the denominator, and
            needed by it alone.
        policy_mask_BT: ``[B, T]`` False at tokens without a policy term, whose KL and count remain.
            None: all have one.
        sampling_logprobs_BT: ``[B, T]`` log-probs as computed while sampling; needed by the two
            options below.
        sampler_correction, sampler_correction_min, sampler_correction_max: see
            :func:`sampler_weights`.
        off_policy_mask_threshold: see :func:`off_policy_mask`; None: no completion is left out.

    Returns:
        ``loss_sum``: a scalar, to be divided by :func:`loss_denominator` added up over
            micro-batches and ranks.
        ``stats``: ``ratio``, ``clip_ratio/low_mean``, ``clip_ratio/high_mean``,
        ``clip_ratio/region_mean``; with a reference ``kl``; with corrections ``sampling/...``. Each
        is (sum, count) over the tokens to train on or, for weights of sequences, over the
        completions with such tokens; without gradient.

    Raises:
        ValueError: on an unknown name, other shapes (also of a user's loss), ``beta`` without a
            reference, ``constant`` without ``max_length``.
    """
    B, T = logprobs_BT.shape
    if advantages_B.shape != (B,):
        raise ValueError(
            f"expected one advantage for each of {B} rows, got {tuple(advantages_B.shape)}"
        )
    others = (old_logprobs_BT, mask_BT, ref_logprobs_BT, policy_mask_BT, sampling_logprobs_BT)
    for tensor in others:
        if tensor is not None and tensor.shape != (B, T):
            raise ValueError(
                f"expected tensors of the log-probs' shape {(B, T)}, got {tuple(tensor.shape)}"
            )
    _check_aggregation(aggregation, max_length)
    if not callable(objective):
        check_choice("objective", objective, Objective)
    check_choice("importance_level", importance_level, ImportanceLevel)
    check_choice("kl_estimator", kl_estimator, KLEstimator)
    check_choice("sampler_correction", sampler_correction, SamplerCorrection)
    if beta != 0 and ref_logprobs_BT is None:
        raise ValueError(f"beta={beta} needs ref_logprobs_BT")

    mask_BT = mask_BT.bool()
    A_B1 = advantages_B.detach().to(logprobs_BT.dtype)[:, None]
    logprobs_BT = _zero_outside(mask_BT, logprobs_BT)
    old_logprobs_BT = _zero_outside(mask_BT, old_logprobs_BT.detach())
    ratio_BT = importance_ratio(logprobs_BT, old_logprobs_BT, mask_BT, importance_level)

    # How far the policy has moved at each token since it sampled, and how far it may.
    if epsilon_high is None:
        epsilon_high = epsilon
    if objective == "dppo_tv":
        ratio_or_probability_change_BT = logprobs_BT.detach().exp() - old_logprobs_BT.exp()
        bounds = (-epsilon, epsilon_high)
    else:
        ratio_or_probability_change_BT = ratio_BT.detach()
        bounds = (1 - epsilon, 1 + epsilon_high)
    is_low_BT, is_high_BT = clipped_tokens(objective, ratio_or_probability_change_BT, A_B1, bounds)
    is_clipped_BT = is_low_BT | is_high_BT

    # The policy term of each token, and its weights.
    if callable(objective):
        # Copies, because the function may change them.
        loss_BT = objective(
            logprobs_BT.clone(),
            ratio_BT.clone(),
            A_B1.clone(),
            mask_BT.clone(),
            bounds,
        )
        check_returned("the objective", loss_BT, mask_BT.shape)
        # There must be a gradient, also of a loss that uses no log-prob.
        loss_BT = loss_BT + 0 * logprobs_BT
    else:
        loss_BT = surrogate_loss(
            objective,
            logprobs_BT,
            ratio_BT,
            A_B1,
            bounds,
            delta,
            (sapo_temperature_pos, sapo_temperature_neg),
        )
    if objective == "dppo_tv":
        loss_BT = loss_BT.masked_fill(is_clipped_BT, 0.0)
    if policy_mask_BT is not None:
        loss_BT = loss_BT * policy_mask_BT

    # Corrections for a sampler that is not quite the policy.
    sums = {}
    has_tokens_B1 = mask_BT.any(dim=1, keepdim=True)
    if sampler_correction != "none":
        weights, is_cut = sampler_weights(
            old_logprobs_BT,
            sampling_logprobs_BT,
            mask_BT,
            sampler_correction,
            sampler_correction_min,
            sampler_correction_max,
        )
        loss_BT = loss_BT * weights
        counted = mask_BT if sampler_correction.startswith("token") else has_tokens_B1
        count = counted.sum()
        name = "sampling/importance_sampling_ratio"
        sums[f"{name}/mean"] = (weights[counted].sum(), count)
        sums[f"{name}/cut"] = (is_cut[counted].sum(), count)
    if off_policy_mask_threshold is not None:
        is_kept_B1 = off_policy_mask(
            logprobs_BT,
            sampling_logprobs_BT,
            A_B1,
            mask_BT,
            off_policy_mask_threshold,
        )
        loss_BT = loss_BT * is_kept_B1
        num_masked = (~is_kept_B1 & has_tokens_B1).sum()
        sums["sampling/off_policy_masked"] = (num_masked, has_tokens_B1.sum())
    stats = {
        "ratio": ratio_BT,
        "clip_ratio/low_mean": is_low_BT,
        "clip_ratio/high_mean": is_high_BT,
        "clip_ratio/region_mean": is_clipped_BT,
    }
    if ref_logprobs_BT is not None:
        ref_logprobs_BT = _zero_outside(mask_BT, ref_logprobs_BT.detach())
        kl_BT = kl_estimate(logprobs_BT, ref_logprobs_BT, kl_estimator)
        if unbiased_kl:
            kl_BT = ratio_BT * kl_BT
        stats["kl"] = kl_BT
        if beta != 0:
            loss_BT = loss_BT + beta * kl_BT

    # A mean over the tokens of a response weighs long and short ones alike; a sum weighs each token
    # alike.
    loss_BT = _zero_outside(mask_BT, loss_BT)
    if aggregation == "response_mean":
        lengths_B = mask_BT.sum(dim=1).clamp(min=1)
        loss_sum = (loss_BT.sum(dim=1) / lengths_B).sum()
    else:
        loss_sum = loss_BT.sum()

    with torch.no_grad():
        count = mask_BT.sum().to(torch.float32)
        for name, x_BT in stats.items():
            counted_BT = _zero_outside(mask_BT, x_BT.to(torch.float32))
            sums[name] = (counted_BT.sum(), count)
    return loss_sum, sums


def loss_denominator(
    mask_BT: Tensor,
    *,
    aggregation: Aggregation = "response_mean",
    max_length: float | None = None,
) -> Tensor:
    """The divisor of :func:`policy_loss`'s sum, for these rows; the caller adds it up over
    micro-batches and ranks.

    ``response_mean``: the number of responses with a token to train on. ``token_mean``: the number
    of those tokens (DAPO, eq. 8). ``constant``: responses x ``max_length``, whatever their length
    (Dr. GRPO). An fp32 scalar.
    """
    _check_aggregation(aggregation, max_length)
    mask_BT = mask_BT.bool()
    if aggregation == "response_mean":
        count = mask_BT.any(dim=1).sum()
    elif aggregation == "token_mean":
        count = mask_BT.sum()
    else:
        count = torch.tensor(len(mask_BT) * max_length, device=mask_BT.device)
    return count.to(torch.float32)


def importance_ratio(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    mask_BT: Tensor,
    importance_level: ImportanceLevel = "token",
) -> Tensor:
    """``[B, T]`` probability of each token under the policy that is trained, over that under the
    policy that sampled.

    ``token``: ``exp(logprob - old_logprob)``. ``sequence``: the geometric mean of these over the
    response, the same at each of its tokens (GSPO, eq. 7); its gradient reaches them all. Outside
    of the mask log-probs must be 0, and it is 1.
    """
    log_ratio_BT = logprobs_BT - old_logprobs_BT
    if importance_level == "sequence":
        mean_B1 = _mean_of_tokens(log_ratio_BT, mask_BT)
        log_ratio_BT = _zero_outside(mask_BT, mean_B1)
    # exp() overflows fp32 at 88. An infinite ratio times 0 (a clipped branch, advantage 0) would be
    # a NaN gradient.
    return log_ratio_BT.clamp(max=80.0).exp()


def surrogate_loss(
    objective: Objective,
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    A_B1: Tensor,
    bounds: Bounds,
    delta: float | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
) -> Tensor:
    """``[B, T]`` the loss of each token, whose gradient is the policy gradient.

    - ``clip``: ``-min(ratio * A, clip(ratio, low, high) * A)``, the first ratio at most ``delta``
      (PPO; GRPO, eq. 3).
    - ``cispo``: ``-min(ratio, high) * A * logprob``, without gradient through the ratio
      (MiniMax-M1, eq. 4).
    - ``dppo_tv``: ``-min(ratio, 20) * A * logprob``, likewise, to be set to 0 at
      :func:`clipped_tokens` (DPPO, Binary-TV). The bounds are on the change of the token's
      probability, a lower bound of the total variation.
    - ``sapo``: ``-sigmoid(t * (ratio - 1)) * 4 / t * A`` (SAPO): instead of a bound, a gradient
      that fades as the ratio leaves 1. ``t`` is the first temperature where A is positive, else the
      second.
    - ``reinforce``: ``-A * logprob``.
    """
    if objective == "clip":
        bounded_BT = ratio_BT if delta is None else ratio_BT.clamp(max=delta)
        clipped_BT = ratio_BT.clamp(*bounds)
        return -torch.minimum(bounded_BT * A_B1, clipped_BT * A_B1)
    if objective == "sapo":
        positive, other = sapo_temperatures
        t_B1 = torch.where(A_B1 > 0, A_B1.new_tensor(positive), A_B1.new_tensor(other))
        gate_BT = torch.sigmoid(t_B1 * (ratio_BT - 1))
        return -gate_BT * 4 / t_B1 * A_B1
    if objective == "reinforce":
        return -A_B1 * logprobs_BT
    most = bounds[1] if objective == "cispo" else MOST_DPPO_RATIO
    weight_BT = ratio_BT.detach().clamp(max=most)
    return -weight_BT * A_B1 * logprobs_BT


def clipped_tokens(
    objective: Objective | UserObjective,
    ratio_or_probability_change_BT: Tensor,
    A_B1: Tensor,
    bounds: Bounds,
) -> tuple[Tensor, Tensor]:
    """Two boolean ``[B, T]``: tokens clipped at the lower bound, and tokens clipped at the upper
    bound.

    ``clip`` and ``dppo_tv``: where the policy gradient is 0, because the policy has moved far
    enough in the direction of the advantage; of a user's loss the same tokens, whatever it does
    there. ``cispo``: where the weight is at its bound. The other objectives have no bound.
    ``ratio_or_probability_change_BT`` is the importance ratio; in ``dppo_tv`` the token's
    probability less its probability when sampled."""
    lowest, highest = bounds
    is_low_BT = ratio_or_probability_change_BT < lowest
    is_high_BT = ratio_or_probability_change_BT > highest
    if objective in ("clip", "dppo_tv") or callable(objective):
        return is_low_BT & (A_B1 < 0), is_high_BT & (A_B1 > 0)
    nowhere_BT = torch.zeros_like(is_low_BT)
    if objective == "cispo":
        return nowhere_BT, is_high_BT & (A_B1 != 0)
    return nowhere_BT, nowhere_BT


def kl_estimate(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    kl_estimator: KLEstimator,
) -> Tensor:
    """``[B, T]`` estimate of the KL from policy to reference, in nats (Schulman, "Approximating KL
    Divergence", 2020).

    With ``d = ref_logprob - logprob``: ``k1`` is ``-d``, ``k2`` is ``d**2 / 2``, ``k3`` is ``exp(d)
    - d - 1``.
    """
    d_BT = ref_logprobs_BT - logprobs_BT
    if kl_estimator == "k3":
        return d_BT.exp() - d_BT - 1
    if kl_estimator == "k2":
        return d_BT**2 / 2
    return -d_BT


def sampler_weights(
    old_logprobs_BT: Tensor,
    sampling_logprobs_BT: Tensor,
    mask_BT: Tensor,
    correction: SamplerCorrection,
    lowest: float | None,
    highest: float | None,
) -> tuple[Tensor, Tensor]:
    """Weights of the policy term that correct for a sampler that is not quite the policy, and True
    where one is cut.

    A weight is the probability under the policy as scored before the update, over that with which
    the sampler drew. ``token_...``: ``[B, T]``, of each token. ``sequence_...``: ``[B, 1]``, of the
    completion, the product over tokens. Outside of the bounds (``None``: no bound) it is the
    nearest bound with ``..._truncate`` (truncated importance sampling, TIS), and 0 with
    ``..._mask`` (masked importance sampling, MIS). ``geometric_mask``: ``[B, 1]``, 1 if the
    geometric mean over the completion's tokens is within the bounds, else 0. Outside of the mask it
    means nothing.
    """
    log_ratio = _zero_outside(mask_BT, old_logprobs_BT.detach() - sampling_logprobs_BT.detach())
    if correction == "geometric_mask":
        log_ratio = _mean_of_tokens(log_ratio, mask_BT)
    elif correction.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.clamp(max=80.0).exp()  # exp() overflows fp32 at 88
    lowest = 0.0 if lowest is None else lowest
    bounded = ratio.clamp(lowest, highest)
    is_cut = ratio != bounded
    if correction == "geometric_mask":
        weights = (~is_cut).to(ratio.dtype)
    elif correction.endswith("mask"):
        weights = ratio.masked_fill(is_cut, 0.0)
    else:
        weights = bounded
    return weights, is_cut


def off_policy_mask(
    logprobs_BT: Tensor,
    sampling_logprobs_BT: Tensor,
    A_B1: Tensor,
    mask_BT: Tensor,
    threshold: float,
) -> Tensor:
    """``[B, 1]`` False at completions that off-policy sequence masking (DeepSeek-V3.2) leaves out.

    They have a negative advantage, and the policy has moved away from the sampler by more than
    ``threshold`` nats: the mean over their tokens of the sampler's log-prob less the policy's.
    """
    difference_BT = _zero_outside(mask_BT, sampling_logprobs_BT.detach() - logprobs_BT.detach())
    kl_B1 = _mean_of_tokens(difference_BT, mask_BT)
    return (A_B1 >= 0) | (kl_B1 <= threshold)


def entropy_threshold(entropies_N: Tensor, share: float) -> Tensor:
    """The entropy at or above which lies a ``share`` of the tokens; infinite if there are no
    tokens.

    By numpy, because ``torch.quantile`` takes at most 16 million values.
    """
    if len(entropies_N) == 0:
        return torch.tensor(torch.inf)
    values = entropies_N.double().cpu().numpy()
    return torch.tensor(np.quantile(values, 1 - share))


def _mean_of_tokens(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """``[B, 1]`` mean over the tokens of the mask; the values outside of it must be 0."""
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True)
    return values_BT.sum(dim=1, keepdim=True) / lengths_B1.clamp(min=1)


def _zero_outside(mask_BT: Tensor, values_BT: Tensor) -> Tensor:
    """0 outside of the mask. Selects instead of multiplying, because NaN times 0 is NaN, in values
    and in gradients."""
    return torch.where(mask_BT, values_BT, 0.0)


def _check_aggregation(aggregation: Aggregation, max_length: float | None) -> None:
    check_choice("aggregation", aggregation, Aggregation)
    if aggregation == "constant" and not max_length:
        raise ValueError(
            "aggregation='constant' divides by responses x max_length: give max_length in tokens"
        )

"""The policy loss as a sum over completions, and the denominator that turns the sum into a mean. Pure functions.

Shapes: ``B`` rows (completions), ``T`` completion tokens.

The sum and its denominator are two functions because in a mean of means, tokens of a small micro-batch (or rank) would weigh more.
The caller adds up the denominator over the whole optimizer step and all ranks, then divides each micro-batch's sum by that number.
"""

import torch
from torch import Tensor

from grpo.algorithm.choices import Aggregation, ImportanceLevel, KLEstimator, Objective, SamplerCorrection, check_choice
from grpo.algorithm.corrections import off_policy_mask, sampler_weights
from grpo.algorithm.objectives import clip_bounds, clipped_tokens, probability_change, surrogate_loss


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
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    unbiased_kl: bool = False,
    aggregation: Aggregation = "response_mean",
    max_length: int | None = None,
    policy_mask_BT: Tensor | None = None,
    sampling_logprobs_BT: Tensor | None = None,
    sampler_correction: SamplerCorrection = "none",
    sampler_correction_min: float | None = None,
    sampler_correction_max: float | None = 3.0,
    off_policy_mask_threshold: float | None = None,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The surrogate loss of every token, times its weights, plus ``beta`` times its KL to the reference, summed over rows.

    Args:
        logprobs_BT: ``[B, T]`` log-probabilities of the tokens under the policy being trained (nats, at the sampling temperature).
        old_logprobs_BT: ``[B, T]`` the same under the policy that sampled the tokens; a constant. For ``dppo_tv`` as the sampler had them.
        advantages_B: ``[B]`` one advantage per completion.
        mask_BT: ``[B, T]`` True (or 1) at the tokens to train on. The values at other positions have no influence, even if NaN.
        ref_logprobs_BT: ``[B, T]`` the same under the frozen reference model; needed when ``beta > 0``.
        objective: the loss of a token: ``clip``, ``cispo``, ``sapo``, ``dppo_tv`` or ``reinforce``; see ``objectives.py``.
        importance_level: one importance ratio per ``token``, or one per ``sequence``; see :func:`importance_ratio`.
        epsilon: importance ratios below ``1 - epsilon`` are clipped (``clip`` only; ``dppo_tv``: probabilities that fell by more).
        epsilon_high: importance ratios above ``1 + epsilon_high`` are clipped (DAPO's clip-higher); ``None``: above ``1 + epsilon``.
        delta: upper bound of the ratio where ``clip`` does not clip it, for negative advantages (INTELLECT-2); ``None``: no bound.
        beta: weight of the KL to the reference.
        sapo_temperature_pos, sapo_temperature_neg: see :func:`grpo.algorithm.objectives.sapo_loss`.
        kl_estimator: ``k1``, ``k2`` or ``k3``; see :func:`kl_estimate`.
        aggregation: with ``response_mean`` each row's loss is its mean over tokens, otherwise its sum.
        max_length: bound on the length of completions, in tokens; needed by ``constant``, for the denominator.
        unbiased_kl: multiply each token's KL by its importance ratio, with gradient through both (DeepSeek-V3.2).
        policy_mask_BT: ``[B, T]`` False at tokens that have no policy term; their KL stays, and the denominators count them. None: all have one.
        sampling_logprobs_BT: ``[B, T]`` log-probs as computed while sampling, a constant; needed by the two options below.
        sampler_correction, sampler_correction_min, sampler_correction_max: see :func:`sampler_weights`.
        off_policy_mask_threshold: see :func:`off_policy_mask`; None: all completions are kept.

    Returns:
        ``loss_sum``: a scalar, to be divided by :func:`loss_denominator` added up over micro-batches and ranks.
        ``stats``: ``ratio``, ``clip_ratio/low_mean``, ``clip_ratio/high_mean``, ``clip_ratio/region_mean``; with a reference ``kl``. Each is
        (sum, count) over the tokens to train on, without gradient.

    Raises:
        ValueError: on an unknown name, disagreeing shapes, ``beta > 0`` without a reference, ``constant`` without ``max_length``.
    """
    given = dict(old_logprobs=old_logprobs_BT, mask=mask_BT, ref_logprobs=ref_logprobs_BT)
    given |= dict(policy_mask=policy_mask_BT, sampling_logprobs=sampling_logprobs_BT)
    _check_shapes(logprobs_BT, advantages_B, **given)
    _check_aggregation(aggregation, max_length)
    check_choice("kl_estimator", kl_estimator, KLEstimator)
    check_choice("sampler_correction", sampler_correction, SamplerCorrection)
    needs_sampler = sampler_correction != "none" or off_policy_mask_threshold is not None
    if needs_sampler and sampling_logprobs_BT is None:
        raise ValueError("sampler_correction and off_policy_mask_threshold need sampling_logprobs_BT")
    if beta != 0 and ref_logprobs_BT is None:
        raise ValueError(f"beta={beta} needs ref_logprobs_BT")
    bounds = clip_bounds(objective, epsilon, epsilon if epsilon_high is None else epsilon_high)
    mask_BT = mask_BT.bool()
    A_B1 = advantages_B.detach().to(logprobs_BT.dtype)[:, None]
    ratio_BT = importance_ratio(logprobs_BT, old_logprobs_BT, mask_BT, importance_level)
    logprobs_BT = _zero_outside(mask_BT, logprobs_BT)
    old_logprobs_BT = _zero_outside(mask_BT, old_logprobs_BT)

    options = dict(old_logprobs_BT=old_logprobs_BT, sapo_temperatures=(sapo_temperature_pos, sapo_temperature_neg))
    loss_BT = surrogate_loss(objective, logprobs_BT, ratio_BT, A_B1, bounds, delta, **options)
    if policy_mask_BT is not None:
        loss_BT = loss_BT * policy_mask_BT
    if sampler_correction != "none":
        correction = sampler_correction, sampler_correction_min, sampler_correction_max
        loss_BT = loss_BT * sampler_weights(old_logprobs_BT, sampling_logprobs_BT, mask_BT, *correction)[0]
    if off_policy_mask_threshold is not None:
        sampled_BT = sampling_logprobs_BT
        loss_BT = loss_BT * off_policy_mask(logprobs_BT, sampled_BT, A_B1, mask_BT, off_policy_mask_threshold)
    if ref_logprobs_BT is not None:
        kl_BT = kl_estimate(logprobs_BT, _zero_outside(mask_BT, ref_logprobs_BT.detach()), kl_estimator)
        if unbiased_kl:
            kl_BT = ratio_BT * kl_BT
        if beta != 0:
            loss_BT = loss_BT + beta * kl_BT
    loss_sum = _sum_over_rows(loss_BT, mask_BT, aggregation)

    with torch.no_grad():
        moved_BT = probability_change(logprobs_BT, old_logprobs_BT) if objective == "dppo_tv" else ratio_BT
        is_low_BT, is_high_BT = clipped_tokens(objective, moved_BT, A_B1, bounds)
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

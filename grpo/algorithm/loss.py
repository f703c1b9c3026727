"""The policy loss as a sum over completions, and the denominator that turns the sum into a mean.

    B   rows, one completion each         A_B1        advantage of each row, a constant
    T   tokens of the longest one         ratio_BT    probability now over probability when sampled
                                          mask_BT     True at the tokens that are trained on

A suffix of ``1`` is an axis of size 1, which broadcasts. All functions are pure.

Sum and denominator are two functions, because a mean over the optimizer step is no mean of means:

    (sum_1 + sum_2) / (N_1 + N_2)  !=  (sum_1 / N_1 + sum_2 / N_2) / 2       unless N_1 = N_2

On the right, the N_1 tokens of a small micro-batch or rank weigh more than the N_2 of a large one,
and the update depends on how the batch is cut. So the caller first counts N over the whole
optimizer step and all ranks, then divides the sum of each micro-batch by that N.
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
"""Least and greatest importance ratio that is not clipped. With ``dppo_tv``: change of
probability."""

UserObjective = Callable[[Tensor, Tensor, Tensor, Tensor, Bounds], Tensor]
"""A user's function ``fn(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds) -> loss_BT``.

It returns the loss of each token. Log-probs and importance ratios have a gradient. Outside of the
mask they are 0 and 1, and the loss counts as 0. ``bounds``: ``(1 - epsilon, 1 + epsilon_high)``."""

MAX_LOG_RATIO = 80.0
"""Log-ratios are capped here, because ``exp`` overflows fp32 at 88."""

MAX_DPPO_WEIGHT = 20.0
"""Largest importance ratio as a weight of ``dppo_tv``, as in the authors' code."""

SAPO_TEMPERATURE_POS = 1.0
SAPO_TEMPERATURE_NEG = 1.05
"""Temperatures of ``sapo`` for positive and for other advantages, as in the paper. The second is
higher, so that the gradients which push tokens down fade sooner."""


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
    """Sum of the loss over all rows, to be divided by :func:`loss_denominator`.

        loss_sum = sum_b c_b sum_t m_bt ( w_bt L_bt + beta kl_bt )

        ratio_bt = exp(lp_bt - old_bt)                    importance_ratio
        L_bt     = - min( ratio_bt A_b,                   surrogate_loss: the policy term
                          clip(ratio_bt, 1 - epsilon, 1 + epsilon_high) A_b )
        w_bt     = 1                                      sampler_weights, off_policy_mask
        kl_bt    = exp(d) - d - 1,  d = ref_bt - lp_bt    kl_estimate
        c_b      = 1 / sum_t m_bt                         response_mean; otherwise 1

    These are the defaults: GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3 and 4), with the sign of a
    loss. The functions named on the right have the other choices.

    Args:
        logprobs_BT: ``[B, T]`` log-probabilities lp of the tokens under the policy that is trained,
            in nats, at the sampling temperature.
        old_logprobs_BT: ``[B, T]`` log-probs under the policy that sampled, a constant. With
            ``dppo_tv`` those that the sampler itself computed.
        advantages_B: ``[B]`` the advantage A of each completion.
        mask_BT: ``[B, T]`` the mask m, True (or 1) at the tokens to train on. Values elsewhere have
            no influence, even if NaN.
        ref_logprobs_BT: ``[B, T]`` log-probs under the frozen reference; needed if beta is not 0.
        objective: the policy term, by its name in :func:`surrogate_loss`; or a
            :data:`UserObjective`.
        importance_level: one ratio per ``token``, or one per ``sequence``.
        epsilon: ratios below ``1 - epsilon`` are clipped. With ``dppo_tv``: tokens whose
            probability fell by more.
        epsilon_high: ratios above ``1 + epsilon_high`` are clipped (clip-higher: DAPO, arXiv
            2503.14476, section 3.1). Default: ``epsilon``.
        delta: upper bound of the ratio where ``clip`` does not clip it, at negative advantages
            (INTELLECT-2, arXiv 2505.07291). Default: no bound.
        beta: weight of the KL to the reference.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
        unbiased_kl: multiply each token's KL by its ratio, with gradient through both
            (DeepSeek-V3.2, arXiv 2512.02556).
        aggregation: ``response_mean``, ``token_mean`` or ``constant``.
        max_length: completion length of ``constant``, in tokens; needed by it alone.
        policy_mask_BT: ``[B, T]`` False at tokens without a policy term, which still have a KL and
            count in the denominator. Default: all tokens have one.
        sampling_logprobs_BT: ``[B, T]`` log-probs as computed while sampling; needed by the two
            options below.
        sampler_correction, sampler_correction_min, sampler_correction_max: see
            :func:`sampler_weights`. Default: no weights.
        off_policy_mask_threshold: see :func:`off_policy_mask`. Default: no mask.

    Returns:
        ``loss_sum``: a scalar with gradient.
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
    # A tensor of another shape might broadcast, and train on wrong numbers without an error.
    tensors = (old_logprobs_BT, mask_BT, ref_logprobs_BT, policy_mask_BT, sampling_logprobs_BT)
    for tensor in tensors:
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

    # lp, old, A. Only lp has a gradient: the others are data of the rollout.
    mask_BT = mask_BT.bool()
    logprobs_BT = _zero_outside(mask_BT, logprobs_BT)
    old_logprobs_BT = _zero_outside(mask_BT, old_logprobs_BT.detach())
    A_B1 = advantages_B.detach().to(logprobs_BT.dtype)[:, None]
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

    # L, the policy term of each token.
    if callable(objective):
        # Copies, because the function may change them.
        policy_BT = objective(
            logprobs_BT.clone(),
            ratio_BT.clone(),
            A_B1.clone(),
            mask_BT.clone(),
            bounds,
        )
        check_returned("the objective", policy_BT, mask_BT.shape)
        # Every rank needs a backward pass, also for a function that used no log-prob here.
        policy_BT = policy_BT + 0 * logprobs_BT
    else:
        policy_BT = surrogate_loss(objective, logprobs_BT, ratio_BT, A_B1, bounds, delta)
    if objective == "dppo_tv":
        policy_BT = policy_BT.masked_fill(is_clipped_BT, 0.0)

    # w, constants that the policy term is multiplied by. A token of weight 0 still counts in the
    # denominator: otherwise the fewer tokens teach, the more each would weigh.
    if policy_mask_BT is not None:
        policy_BT = policy_BT * policy_mask_BT
    stats = {}
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
        policy_BT = policy_BT * weights
        counted = mask_BT if sampler_correction.startswith("token") else has_tokens_B1
        count = counted.sum()
        name = "sampling/importance_sampling_ratio"
        stats[f"{name}/mean"] = (weights[counted].sum(), count)
        stats[f"{name}/cut"] = (is_cut[counted].sum(), count)
    if off_policy_mask_threshold is not None:
        is_unmasked_B1 = off_policy_mask(
            logprobs_BT,
            sampling_logprobs_BT,
            A_B1,
            mask_BT,
            off_policy_mask_threshold,
        )
        policy_BT = policy_BT * is_unmasked_B1
        num_masked = (~is_unmasked_B1 & has_tokens_B1).sum()
        stats["sampling/off_policy_masked"] = (num_masked, has_tokens_B1.sum())

    # kl, and the loss of each token. At beta 0 a reference serves the metric alone.
    loss_BT = policy_BT
    values_to_report = {
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
        values_to_report["kl"] = kl_BT
        if beta != 0:
            loss_BT = loss_BT + beta * kl_BT

    # c and the sum. A mean over the tokens of a response weighs long and short responses alike, so
    # that a token of a long one weighs less; a sum weighs tokens alike (Dr. GRPO, section 3.1).
    loss_BT = _zero_outside(mask_BT, loss_BT)
    if aggregation == "response_mean":
        lengths_B = mask_BT.sum(dim=1).clamp(min=1)
        loss_sum = (loss_BT.sum(dim=1) / lengths_B).sum()
    else:
        loss_sum = loss_BT.sum()

    # Sums and counts, not means: they add up over micro-batches and ranks, as the loss does.
    with torch.no_grad():
        count = mask_BT.sum().to(torch.float32)
        for name, values_BT in values_to_report.items():
            counted_BT = _zero_outside(mask_BT, values_BT.to(torch.float32))
            stats[name] = (counted_BT.sum(), count)
    return loss_sum, stats


def loss_denominator(
    mask_BT: Tensor,
    *,
    aggregation: Aggregation = "response_mean",
    max_length: float | None = None,
) -> Tensor:
    """Number N by which the sum of :func:`policy_loss` is divided, for these rows.

        response_mean    N = number of rows b with sum_t m_bt > 0       (GRPO, eq. 3)
        token_mean       N = sum_b sum_t m_bt                           (DAPO, eq. 8)
        constant         N = B * max_length                             (Dr. GRPO, arXiv 2503.20783)

    The caller adds up N over all micro-batches and ranks of an optimizer step before the first
    backward pass.

    Args:
        mask_BT: ``[B, T]`` True at the tokens to train on.
        aggregation: see above.
        max_length: the completion length of ``constant``, in tokens.

    Returns:
        A scalar, fp32.

    Raises:
        ValueError: on an unknown aggregation, or ``constant`` without ``max_length``.
    """
    _check_aggregation(aggregation, max_length)
    mask_BT = mask_BT.bool()
    if aggregation == "response_mean":
        count = mask_BT.any(dim=1).sum()
    elif aggregation == "token_mean":
        count = mask_BT.sum()
    else:
        # Also rows without a token: the point of a constant is that no length changes it.
        count = torch.tensor(len(mask_BT) * max_length, device=mask_BT.device)
    return count.to(torch.float32)


def importance_ratio(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    mask_BT: Tensor,
    importance_level: ImportanceLevel = "token",
) -> Tensor:
    """Importance ratio ``[B, T]``: a token's probability now over that when it was sampled.

        token        ratio_bt = exp(lp_bt - old_bt)                               (GRPO, eq. 3)
        sequence     ratio_bt = exp( 1/|o_b| sum_s (lp_bs - old_bs) )             (GSPO, eq. 7)

    The second (arXiv 2507.18071) is the geometric mean of the first, the same for all tokens of a
    response, and its gradient reaches them all.

    Log-probs outside of the mask must be 0. The ratio is 1 there.
    """
    log_ratio_BT = logprobs_BT - old_logprobs_BT
    if importance_level == "sequence":
        mean_B1 = _mean_of_tokens(log_ratio_BT, mask_BT)
        log_ratio_BT = _zero_outside(mask_BT, mean_B1)
    # An infinite ratio times 0 (a clipped branch, advantage 0) would be a NaN gradient.
    return log_ratio_BT.clamp(max=MAX_LOG_RATIO).exp()


def surrogate_loss(
    objective: Objective,
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    A_B1: Tensor,
    bounds: Bounds,
    delta: float | None = None,
) -> Tensor:
    """Policy term ``[B, T]`` of each token: a loss whose gradient is the policy gradient.

        reinforce    L = - A lp
        clip         L = - min( min(ratio, delta) A, clip(ratio, low, high) A )
        cispo        L = - sg(min(ratio, high)) A lp
        dppo_tv      L = - sg(min(ratio, 20)) A lp        0 at the clipped_tokens
        sapo         L = - 4/tau sigmoid(tau (ratio - 1)) A

    sg stops the gradient, ``(low, high) = bounds``. At ratio 1 the gradient of each is that of
    reinforce, because d ratio / d lp = ratio.

    clip: PPO (arXiv 1707.06347, eq. 7) and GRPO. cispo: MiniMax-M1 (arXiv 2506.13585, eq. 4).
    dppo_tv: DPPO, Binary-TV (arXiv 2602.04879). sapo: arXiv 2511.20347.
    """
    if objective == "reinforce":
        return -A_B1 * logprobs_BT

    if objective == "clip":
        # The smaller of the two is flat where the policy has moved past a bound the way A points:
        # nothing is gained by moving on. Where the policy moved the other way, the gradient stays.
        # With A < 0 that gradient grows with the ratio, and a single token could rule the update:
        # hence delta.
        bounded_BT = ratio_BT if delta is None else ratio_BT.clamp(max=delta)
        clipped_BT = ratio_BT.clamp(*bounds)
        return -torch.minimum(bounded_BT * A_B1, clipped_BT * A_B1)

    if objective == "sapo":
        # The slope over the ratio is 4 s (1 - s) A with s = sigmoid(...): A at ratio 1, where s is
        # 1/2, and less on both sides. It fades where clip drops to 0.
        pos = A_B1.new_tensor(SAPO_TEMPERATURE_POS)
        neg = A_B1.new_tensor(SAPO_TEMPERATURE_NEG)
        tau_B1 = torch.where(A_B1 > 0, pos, neg)
        gate_BT = torch.sigmoid(tau_B1 * (ratio_BT - 1))
        return -gate_BT * 4 / tau_B1 * A_B1

    # A bounded ratio as a constant weight leaves every token its gradient (cispo), or all but those
    # that policy_loss then sets to 0 (dppo_tv).
    max_weight = bounds[1] if objective == "cispo" else MAX_DPPO_WEIGHT
    weight_BT = ratio_BT.detach().clamp(max=max_weight)
    return -weight_BT * A_B1 * logprobs_BT


def clipped_tokens(
    objective: Objective | UserObjective,
    ratio_or_probability_change_BT: Tensor,
    A_B1: Tensor,
    bounds: Bounds,
) -> tuple[Tensor, Tensor]:
    """Return two boolean ``[B, T]``: tokens clipped at the lower bound, and at the upper bound.

        clip, dppo_tv    A < 0 and change < low          A > 0 and change > high
        cispo            none                            A != 0 and change > high
        others           none                            none

    With ``clip`` and ``dppo_tv`` these tokens have no policy gradient, with ``cispo`` a smaller
    one. A user's loss is reported as if it clipped like ``clip``.

    Args:
        objective: a name, or a function of the user.
        ratio_or_probability_change_BT: the importance ratio. With ``dppo_tv`` the token's
            probability minus that when it was sampled; its size is the total variation of "this
            token or another", a lower bound of that of the two distributions.
        A_B1: advantages.
        bounds: ``(low, high)``.
    """
    low, high = bounds
    is_low_BT = ratio_or_probability_change_BT < low
    is_high_BT = ratio_or_probability_change_BT > high
    if objective in ("clip", "dppo_tv") or callable(objective):
        return is_low_BT & (A_B1 < 0), is_high_BT & (A_B1 > 0)
    none_BT = torch.zeros_like(is_low_BT)
    if objective == "cispo":
        return none_BT, is_high_BT & (A_B1 != 0)
    return none_BT, none_BT


def kl_estimate(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    kl_estimator: KLEstimator,
) -> Tensor:
    """Estimate ``[B, T]`` of KL(policy || reference) from the sampled token alone, in nats.

        k1 = - d             k2 = d^2 / 2             k3 = exp(d) - d - 1,       d = ref - lp

    Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html); k3 in GRPO,
    eq. 4. Over tokens drawn by the policy, E[-d] is the KL, and E[exp(d)] = sum_v ref_v = 1. So k1
    and k3 are unbiased, and k2 is for small d.

    The gradient of an estimate is another question. Over the same tokens it is on average 0 for k1,
    that of KL(policy || reference) for k2, and that of KL(reference || policy) for k3. Times the
    ratio (``unbiased_kl``), k1 and k3 have the gradient of KL(policy || reference).
    """
    d_BT = ref_logprobs_BT - logprobs_BT
    if kl_estimator == "k3":
        # Never negative, because exp(d) lies above its tangent at 0, which is 1 + d. The added
        # exp(d) - 1 is 0 on average and rises where -d falls, so that k3 varies less than k1.
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
    """Weights of the policy term that correct for a sampler that is not quite the policy.

        token_...         ratio_bt = exp(old_bt - sampler_bt)                       [B, T]
        sequence_...      ratio_b  = exp( sum_t (old_bt - sampler_bt) )             [B, 1]
        geometric_mask    ratio_b  = exp( 1/|o_b| sum_t (old_bt - sampler_bt) )     [B, 1]

        ..._truncate      w = clip(ratio, lowest, highest)                  (TIS)
        ..._mask          w = ratio within the bounds, else 0               (MIS)
        geometric_mask    w = 1 within the bounds, else 0

    Under the sampler, E[ratio f] is E[f] under the policy as it is scored. A bound gives up some of
    that for less variance. TIS, truncated importance sampling: fengyao.notion.site/off-policy-rl.
    MIS, masked importance sampling: ringtech.notion.site/icepop.

    Args:
        old_logprobs_BT: log-probs under the policy before the update, as scored.
        sampling_logprobs_BT: log-probs of the same tokens as the sampler computed them.
        mask_BT: True at the tokens to train on. Weights elsewhere mean nothing.
        correction: one of the six above.
        lowest: lower bound. None: no bound.
        highest: upper bound. None: no bound.

    Returns:
        The weights, and True where a ratio was outside of the bounds: ``[B, T]`` or ``[B, 1]``
        each, without gradient.
    """
    log_ratio = _zero_outside(mask_BT, old_logprobs_BT.detach() - sampling_logprobs_BT.detach())
    if correction == "geometric_mask":
        # Unlike the product, the mean does not grow with the length: no completion is masked for
        # being long.
        log_ratio = _mean_of_tokens(log_ratio, mask_BT)
    elif correction.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    if lowest is None:
        lowest = 0.0
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
    """Return ``[B, 1]`` False at the completions that are too far off-policy to push away from.

        False if  A_b < 0  and  1/|o_b| sum_t (sampler_bt - lp_bt) > threshold      (in nats)

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).
    """
    # The mean estimates KL(sampler || policy). A mistake that the policy would hardly make any more
    # teaches it little, and may destabilise it. A good completion always counts.
    difference_BT = _zero_outside(mask_BT, sampling_logprobs_BT.detach() - logprobs_BT.detach())
    kl_B1 = _mean_of_tokens(difference_BT, mask_BT)
    return (A_B1 >= 0) | (kl_B1 <= threshold)


def entropy_threshold(entropies_N: Tensor, fraction: float) -> Tensor:
    """Return the entropy that this fraction of the tokens have or exceed; infinity without tokens.

    Tokens of high entropy are the forks in a response. ``top_entropy_quantile`` gives only them a
    policy term (arXiv 2506.01939).
    """
    if len(entropies_N) == 0:
        return torch.tensor(torch.inf)
    # By numpy, because torch.quantile takes at most 16 million values.
    values = entropies_N.double().cpu().numpy()
    return torch.tensor(np.quantile(values, 1 - fraction))


def _mean_of_tokens(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean ``[B, 1]`` over the tokens of the mask; the values outside of it must be 0."""
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True)
    # A row without a token has the mean 0, not NaN.
    return values_BT.sum(dim=1, keepdim=True) / lengths_B1.clamp(min=1)


def _zero_outside(mask_BT: Tensor, values_BT: Tensor) -> Tensor:
    """Return the values at the tokens of the mask, and 0 elsewhere."""
    # Selected, not multiplied: NaN times 0 is NaN, in values and in gradients.
    return torch.where(mask_BT, values_BT, 0.0)


def _check_aggregation(aggregation: Aggregation, max_length: float | None) -> None:
    """Raise ValueError on an unknown aggregation, or ``constant`` without ``max_length``."""
    check_choice("aggregation", aggregation, Aggregation)
    if aggregation == "constant" and not max_length:
        raise ValueError(
            "aggregation='constant' divides by responses x max_length: give max_length in tokens"
        )

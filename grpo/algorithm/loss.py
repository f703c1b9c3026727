"""The policy loss as a sum over completions, and the denominator that turns the sum into a mean.

    B   rows: one completion each         A_B1        advantage of each completion, a constant
    T   tokens of the longest completion  ratio_BT    importance ratio: probability now / old
    N   tokens of all completions         mask_BT     the mask m: True at the tokens to train on

A suffix of ``1`` is an axis of size 1, which broadcasts. All functions are pure. ``mean_t x_bt`` is
the mean over the tokens of the mask, ``sum_t m_bt x_bt / sum_t m_bt``.

There are three log-probs of each token, and with a reference model a fourth:

    lp          logprobs_BT             under the policy now, with gradient
    old         old_logprobs_BT         under the policy before the first optimizer step on this
                                        rollout, computed by the trainer
    sampling    sampling_logprobs_BT    as reported by the sampler (engine) that drew the token
    ref         ref_logprobs_BT         under the frozen reference model

old and sampling come from the same model weights, but a sampler such as vLLM rounds differently.
For the objective ``dppo_tv`` the caller passes sampling as ``old_logprobs_BT``.

Sum and denominator are two functions, because a mean over the optimizer step is no mean of means.
If D_i is the denominator of micro-batch i alone,

    (sum_1 + sum_2) / (D_1 + D_2)  !=  (sum_1 / D_1 + sum_2 / D_2) / 2       unless D_1 = D_2

On the right, each token of the micro-batch with the smaller denominator weighs more, so the update
depends on how the batch is cut into micro-batches and ranks. Therefore the caller first adds up
the denominator D over the whole optimizer step and all ranks, and then divides the sum of each
micro-batch by D.
"""

from collections.abc import Callable, Mapping
from typing import Any

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
from grpo.algorithm.own import call_own, own_metrics

Bounds = tuple[float, float]
"""Smallest and largest importance ratio that is not clipped. With ``dppo_tv``: smallest and largest
change of a token's probability."""

UserObjective = Callable[..., Tensor | tuple[Tensor, Mapping[str, Any]]]
"""A user's function ``fn(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds) -> loss_BT``.

It returns the loss of each token, or ``(loss_BT, metrics)``. Log-probs and importance ratios have a
gradient. Outside of the mask, log-probs are 0, ratios are 1, and the returned loss counts as 0.
``bounds`` are ``(1 - epsilon, 1 + epsilon_high)``. A function that names them also gets
``old_logprobs_BT``, ``ref_logprobs_BT``, ``sampling_logprobs_BT``, and ``lengths_B``, the number of
tokens of the mask in each row. See :func:`grpo.algorithm.own.call_own`."""

MAX_LOG_RATIO = 80.0
"""Largest log-ratio; larger ones are lowered to it. The largest number of fp32 is about exp(88.7),
6,000 times exp(80). This leaves room to multiply a ratio by an advantage, and to add up tokens."""

MAX_DPPO_WEIGHT = 20.0
"""Largest importance ratio by which ``dppo_tv`` weights the gradient of a token, as in the code of
the authors of DPPO (arXiv 2602.04879)."""

SAPO_TEMPERATURE_POS = 1.0
SAPO_TEMPERATURE_NEG = 1.05
"""Temperatures of ``sapo`` for positive and for other advantages (arXiv 2511.20347). The second is
higher, so that the gradients that push tokens down fade sooner."""


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
    step: int = 0,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Sum of the loss over all completions, and statistics.

    The caller divides the sum by the total of :func:`loss_denominator` over the optimizer step and
    all ranks.

        loss_sum = sum_b c_b sum_t m_bt ( w_bt L_bt + beta kl_bt )

        ratio_bt = exp(lp_bt - old_bt)                    importance_ratio
        L_bt     = - min( ratio_bt A_b,                   surrogate_loss: the policy term
                          clip(ratio_bt, 1 - epsilon, 1 + epsilon_high) A_b )
        w_bt     = 1                                      sampler_weights, off_policy_mask, and
                                                          the argument policy_mask_BT
        kl_bt    = exp(d) - d - 1,  d = ref_bt - lp_bt    kl_estimate
        c_b      = 1 / sum_t m_bt                         the argument aggregation

    These are the defaults: GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3 and 4), with the sign of a
    loss. The right column names the function or the argument that has the other choices.

    Args:
        logprobs_BT: ``[B, T]`` the log-probs lp of the tokens under the policy now, in nats, at the
            sampling temperature.
        old_logprobs_BT: ``[B, T]`` the old log-probs, a constant. With ``dppo_tv``: the sampling
            log-probs.
        advantages_B: ``[B]`` the advantage A of each completion.
        mask_BT: ``[B, T]`` the mask m, True (or 1) at the tokens to train on. Values elsewhere have
            no influence, even if NaN.
        ref_logprobs_BT: ``[B, T]`` the reference log-probs; needed if beta is not 0.
        objective: the policy term, by its name in :func:`surrogate_loss`; or a
            :data:`UserObjective`.
        importance_level: one ratio per ``token``, or one per ``sequence``. ``dppo_tv`` is defined
            for ``token``; the configuration refuses the other.
        epsilon: at A < 0, ``clip`` clips ratios below ``1 - epsilon``, and ``dppo_tv`` clips tokens
            whose probability fell by more than ``epsilon``. ``cispo``, ``sapo`` and ``reinforce``
            have no lower bound. A user's function gets both bounds.
        epsilon_high: at A > 0, ``clip`` clips ratios above ``1 + epsilon_high`` (clip-higher: DAPO,
            arXiv 2503.14476, section 3.1), and ``dppo_tv`` clips tokens whose probability rose by
            more than ``epsilon_high``. ``cispo`` clips ratios above ``1 + epsilon_high`` at
            either sign of A. ``sapo`` and ``reinforce`` ignore it. Default: ``epsilon``.
        delta: upper bound of the ratio at negative advantages, where ``clip`` has no other upper
            bound (INTELLECT-2, arXiv 2505.07291). It should be above ``1 + epsilon_high``: a lower
            delta also lowers the bound at positive advantages. Other objectives ignore it. Default:
            no bound.
        beta: weight of the KL to the reference.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
        unbiased_kl: multiply the KL of each token by the importance ratio (that of the sequence, if
            ``importance_level`` says so), with gradient through both (DeepSeek-V3.2, arXiv
            2512.02556).
        aggregation: ``response_mean``: c as above. ``token_mean`` or ``constant``: c is 1.
        max_length: not used in the sum. It is checked, so that the same arguments fit
            :func:`loss_denominator`.
        policy_mask_BT: ``[B, T]`` False at tokens without a policy term, which still have a KL and
            count in the denominator. Default: every token has a policy term.
        sampling_logprobs_BT: ``[B, T]`` the sampling log-probs. They must be given with
            ``sampler_correction`` and with ``off_policy_mask_threshold``.
        sampler_correction, sampler_correction_min, sampler_correction_max: see
            :func:`sampler_weights`. Default: no weights. With ``dppo_tv`` every weight would be 1,
            since old is sampling; the configuration refuses the two together.
        off_policy_mask_threshold: see :func:`off_policy_mask`. Default: no mask.
        step: number of the step, for a user's function that asks for it.

    Returns:
        ``loss_sum``: a scalar with gradient.
        ``stats``: name -> (sum, count), two scalars without gradient. The metric of this name is
        the sum over all micro-batches and ranks, divided by the count over all of them. Names are
        those of TRL where TRL has the metric.

        Over the tokens to train on:

        - ``ratio``: the importance ratio.
        - ``clip_ratio/low_mean``, ``clip_ratio/high_mean``, ``clip_ratio/region_mean``: the
          fraction of tokens clipped at the lower bound, at the upper bound, at either.
        - ``kl``: the KL in nats, with ``ref_logprobs_BT``. With ``unbiased_kl``: ratio * KL.

        With ``sampler_correction``, over the tokens to train on or, if a weight is for a whole
        completion, over the completions that have tokens to train on:

        - ``sampling/importance_sampling_ratio/mean``: the weight.
        - ``sampling/importance_sampling_ratio/cut``: the fraction outside of the bounds.

        With ``off_policy_mask_threshold``, over the completions that have tokens to train on:

        - ``sampling/off_policy_masked``: the masked fraction.

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

    # lp, old, A. Only lp has a gradient: the others are constants. Log-probs outside of the mask
    # become 0, so that none of their NaN gets into a sum or a gradient.
    mask_BT = mask_BT.bool()
    logprobs_BT = _zero_outside(mask_BT, logprobs_BT)
    old_logprobs_BT = _zero_outside(mask_BT, old_logprobs_BT.detach())
    if ref_logprobs_BT is not None:
        ref_logprobs_BT = _zero_outside(mask_BT, ref_logprobs_BT.detach())
    A_B1 = advantages_B.detach().to(logprobs_BT.dtype)[:, None]
    ratio_BT = importance_ratio(logprobs_BT, old_logprobs_BT, mask_BT, importance_level)

    # What the objective compares with its bounds: the ratio, or for dppo_tv the change of the
    # token's probability. And the bounds.
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
    stats = {}
    if callable(objective):
        in_order = {
            "logprobs_BT": logprobs_BT,
            "ratio_BT": ratio_BT,
            "A_B1": A_B1,
            "mask_BT": mask_BT,
            "bounds": bounds,
        }
        by_name = {
            "old_logprobs_BT": old_logprobs_BT,
            "ref_logprobs_BT": ref_logprobs_BT,
            "lengths_B": mask_BT.sum(dim=1),
            "step": step,
        }
        if sampling_logprobs_BT is not None:
            by_name["sampling_logprobs_BT"] = _zero_outside(mask_BT, sampling_logprobs_BT)
        policy_BT, metrics = call_own(objective, in_order, by_name)
        stats |= own_metrics(metrics, mask_BT)
        check_returned("algorithm.objective", policy_BT, mask_BT.shape)
        # A user's loss can be independent of the log-probs of this micro-batch, and then has no
        # graph: backward() would fail on this rank, and the others would wait for it. Adding 0 * lp
        # gives the loss a graph.
        policy_BT = policy_BT + 0 * logprobs_BT
    else:
        policy_BT = surrogate_loss(objective, logprobs_BT, ratio_BT, A_B1, bounds, delta)
    # dppo_tv clips by the change of a probability, which surrogate_loss does not get.
    if objective == "dppo_tv":
        policy_BT = policy_BT.masked_fill(is_clipped_BT, 0.0)

    # w, constants by which the policy term is multiplied. A token of weight 0 still counts in c and
    # in the denominator. Otherwise a token would get a larger weight when others are masked.
    #
    # Outside of `mask_BT` a product can be NaN, for example if the advantage of a completion
    # without tokens is NaN: a weight of 0 does not change that. This NaN goes no further.
    # _zero_outside of the loss, below, removes it from the loss, and the backward pass of
    # _zero_outside of the log-probs, above, removes it from the gradient.
    if policy_mask_BT is not None:
        policy_BT = policy_BT * policy_mask_BT
    has_tokens_B1 = mask_BT.any(dim=1, keepdim=True)
    if sampler_correction != "none":
        # [B, T] with one weight per token, [B, 1] with one per completion; so is `is_counted`.
        weights, is_cut = sampler_weights(
            old_logprobs_BT,
            sampling_logprobs_BT,
            mask_BT,
            sampler_correction,
            sampler_correction_min,
            sampler_correction_max,
        )
        policy_BT = policy_BT * weights
        is_per_token = sampler_correction.startswith("token")
        is_counted = mask_BT if is_per_token else has_tokens_B1
        num_weights = is_counted.sum()
        prefix = "sampling/importance_sampling_ratio"
        stats[f"{prefix}/mean"] = (weights[is_counted].sum(), num_weights)
        stats[f"{prefix}/cut"] = (is_cut[is_counted].sum(), num_weights)
    if off_policy_mask_threshold is not None:
        is_kept_B1 = off_policy_mask(
            logprobs_BT,
            sampling_logprobs_BT,
            A_B1,
            mask_BT,
            off_policy_mask_threshold,
        )
        policy_BT = policy_BT * is_kept_B1
        is_masked_B1 = has_tokens_B1 & ~is_kept_B1
        stats["sampling/off_policy_masked"] = (is_masked_B1.sum(), has_tokens_B1.sum())

    # kl, and the loss of each token. At beta 0 the reference log-probs serve the metric alone.
    loss_BT = policy_BT
    values_to_report = {
        "ratio": ratio_BT,
        "clip_ratio/low_mean": is_low_BT,
        "clip_ratio/high_mean": is_high_BT,
        "clip_ratio/region_mean": is_clipped_BT,
    }
    if ref_logprobs_BT is not None:
        kl_BT = kl_estimate(logprobs_BT, ref_logprobs_BT, kl_estimator)
        if unbiased_kl:
            kl_BT = ratio_BT * kl_BT
        values_to_report["kl"] = kl_BT
        if beta != 0:
            loss_BT = loss_BT + beta * kl_BT

    # c and the sum.
    # response_mean: the mean over the tokens of each completion. Each completion has the same
    #     weight, so a token of a long completion has less weight.
    # token_mean: the sum over all tokens, divided later by their number. Each token has the same
    #     weight (DAPO).
    # constant: the sum over all tokens, divided later by a number that does not depend on the
    #     lengths. Each token has the same weight in every step (Dr. GRPO, arXiv 2503.20783, section
    #     3.1).
    loss_BT = _zero_outside(mask_BT, loss_BT)
    if aggregation == "response_mean":
        lengths_B = mask_BT.sum(dim=1).clamp(min=1)
        loss_sum = (loss_BT.sum(dim=1) / lengths_B).sum()
    else:
        loss_sum = loss_BT.sum()

    # Sums and counts, not means: they add up over micro-batches and ranks, as the loss does.
    with torch.no_grad():
        num_tokens = mask_BT.sum().to(torch.float32)
        for name, values_BT in values_to_report.items():
            values_BT = _zero_outside(mask_BT, values_BT.to(torch.float32))
            stats[name] = (values_BT.sum(), num_tokens)
    return loss_sum, stats


def loss_denominator(
    mask_BT: Tensor,
    *,
    aggregation: Aggregation = "response_mean",
    max_length: float | None = None,
) -> Tensor:
    """Denominator D_i of these completions alone, for the sum of :func:`policy_loss`.

        response_mean    D_i = number of rows b with sum_t m_bt > 0     (GRPO, eq. 3)
        token_mean       D_i = sum_b sum_t m_bt                         (DAPO, eq. 8)
        constant         D_i = B * max_length                           (Dr. GRPO, arXiv 2503.20783)

    D is the sum of D_i over all micro-batches and ranks of an optimizer step. The caller adds them
    up before the first backward pass. If no token is trained on, D can be 0: the caller must guard
    the division.

    Args:
        mask_BT: ``[B, T]`` the mask m, True (or 1) at the tokens to train on.
        aggregation: see above.
        max_length: the completion length of ``constant``, in tokens. It is only a factor, so a
            float is accepted.

    Returns:
        A scalar, fp32.

    Raises:
        ValueError: on an unknown aggregation, or ``constant`` without ``max_length``.
    """
    _check_aggregation(aggregation, max_length)
    mask_BT = mask_BT.bool()
    if aggregation == "response_mean":
        # A completion without tokens has no mean and adds nothing to the sum. If it counted, it
        # would make the loss of the others smaller.
        count = mask_BT.any(dim=1).sum()
    elif aggregation == "token_mean":
        count = mask_BT.sum()
    else:
        # Completions without tokens count too: the point of a constant is that no length changes
        # it.
        count = torch.tensor(len(mask_BT) * max_length, device=mask_BT.device)
    return count.to(torch.float32)


def importance_ratio(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    mask_BT: Tensor,
    importance_level: ImportanceLevel,
) -> Tensor:
    """Importance ratio ``[B, T]``: the probability of a token now over its old probability.

        token        ratio_bt = exp(lp_bt - old_bt)                               (GRPO, eq. 3)
        sequence     ratio_bt = exp( mean_t (lp_bt - old_bt) )                    (GSPO, eq. 7)

    The ratio of ``sequence`` (arXiv 2507.18071) is the geometric mean of the completion's ratios of
    ``token``. It is the same for all tokens of a completion, and its gradient reaches all of them.

    Log-probs outside of the mask must be 0. The ratio is 1 there.
    """
    log_ratio_BT = logprobs_BT - old_logprobs_BT
    if importance_level == "sequence":
        mean_B1 = _mean_of_tokens(log_ratio_BT, mask_BT)
        log_ratio_BT = _zero_outside(mask_BT, mean_B1)  # broadcasts to [B, T]
    # Capped, because the backward of exp multiplies by the ratio: an infinite ratio times a zero
    # gradient (of an advantage of 0, or of a product that is clipped) would be NaN.
    return log_ratio_BT.clamp(max=MAX_LOG_RATIO).exp()


def surrogate_loss(
    objective: Objective,
    logprobs_BT: Tensor,
    ratio_BT: Tensor,
    A_B1: Tensor,
    bounds: Bounds,
    delta: float | None,
) -> Tensor:
    """Policy term ``[B, T]`` of each token: a loss whose gradient is the policy gradient.

        reinforce    L = - A lp
        clip         L = - min( min(ratio, delta) A, clip(ratio, low, high) A )
        cispo        L = - sg(min(ratio, high)) A lp
        dppo_tv      L = - sg(min(ratio, MAX_DPPO_WEIGHT)) A lp
        sapo         L = - 4/tau sigmoid(tau (ratio - 1)) A

    sg stops the gradient, ``(low, high)`` are the bounds, tau is ``SAPO_TEMPERATURE_POS`` where
    A > 0, else ``SAPO_TEMPERATURE_NEG``.

    At ratio 1, with one ratio per token, each has the gradient of reinforce, d L / d lp = - A:

    - clip: the ratio is within the bounds, so L = - ratio A, and d ratio / d lp = ratio = 1.
    - cispo, dppo_tv: the weight of lp is the ratio, 1.
    - sapo: d L / d ratio = - A, and d ratio / d lp = 1.

    With dppo_tv the loss of the :func:`clipped_tokens` is 0; :func:`policy_loss` sets this.

    clip: PPO (arXiv 1707.06347, eq. 7) and GRPO. cispo: MiniMax-M1 (arXiv 2506.13585, eq. 4).
    dppo_tv: DPPO, Binary-TV (arXiv 2602.04879). sapo: arXiv 2511.20347.
    """
    if objective == "reinforce":
        return -A_B1 * logprobs_BT

    if objective == "clip":
        # With A > 0 the loss pushes the ratio up, with A < 0 down. Where the ratio is past the
        # bound in this direction, the minimum is the clipped product, whose gradient is 0: the loss
        # gains nothing by moving on. Everywhere else the minimum without delta is ratio * A, with a
        # gradient.
        #
        # With A < 0 this gradient grows with the ratio, and a single token of a large ratio could
        # dominate the update: hence delta, an upper bound of the ratio.
        bounded_BT = ratio_BT if delta is None else ratio_BT.clamp(max=delta)
        clipped_BT = ratio_BT.clamp(*bounds)
        return -torch.minimum(bounded_BT * A_B1, clipped_BT * A_B1)

    if objective == "sapo":
        # With s = sigmoid(tau (ratio - 1)), the gate, d L / d ratio = - 4 s (1 - s) A. At ratio 1,
        # where s = 1/2, this is - A. Away from 1 it fades gradually, while the gradient of clip
        # drops to 0 at a bound.
        pos = A_B1.new_tensor(SAPO_TEMPERATURE_POS)
        neg = A_B1.new_tensor(SAPO_TEMPERATURE_NEG)
        tau_B1 = torch.where(A_B1 > 0, pos, neg)
        gate_BT = torch.sigmoid(tau_B1 * (ratio_BT - 1))
        return -gate_BT * 4 / tau_B1 * A_B1

    # cispo and dppo_tv: the ratio is a constant weight of the gradient of lp. Where the ratio is
    # above its bound, clip takes the gradient away. Here the bound only limits the weight.
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

        clip             A < 0 and ratio < low           A > 0 and ratio > high
        dppo_tv          A < 0 and change < low          A > 0 and change > high
        cispo            none                            A != 0 and ratio > high
        others           none                            none

    With ``clip`` and ``dppo_tv`` these tokens have no policy gradient, with ``cispo`` a smaller
    one. Tokens that only ``delta`` bounds, at A < 0, are not among them. A user's function is
    reported like ``clip``: it gets the bounds of ``clip``, and nothing tells where it clips.

    Args:
        objective: a name, or a function of the user.
        ratio_or_probability_change_BT: the importance ratio. With ``dppo_tv``, the change of the
            token's probability, ``exp(lp) - exp(old)``.
        A_B1: advantages.
        bounds: ``(low, high)``.
    """
    # DPPO bounds the total variation distance of old and new policy. |change| is the distance of
    # their distributions over two outcomes, this token and any other. It is a lower bound of the
    # distance of the distributions over the vocabulary.
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
    eq. 4. Let E be the mean over tokens v drawn by the policy:

        E[-d]     = KL(policy || reference)
        E[exp(d)] = sum_v exp(lp_v) exp(d_v) = sum_v exp(ref_v) = 1

    So k1 and k3 are unbiased. k2 is an approximation for small d.

    The gradient of an unbiased estimate need not be the gradient of the KL:

        E[gradient of k1] = 0
        E[gradient of k2] = gradient of KL(policy || reference)
        E[gradient of k3] = gradient of KL(reference || policy)

    Multiplied by the ratio of the token (``unbiased_kl``), k1 and k3 have on average the gradient
    of KL(policy || reference).
    """
    d_BT = ref_logprobs_BT - logprobs_BT
    if kl_estimator == "k3":
        # Never negative, because exp(d) lies above its tangent at 0, which is 1 + d. The added
        # exp(d) - 1 is 0 on average, and for small d it nearly cancels -d: k3 varies less than k1.
        #
        # exp(d) has no cap, unlike the ratio. ref is at most 0, so d is at most -lp, and exp(d)
        # overflows only if the policy's probability of the token is below exp(-88). The gradient of
        # k3 is rightly large there, and a cap would make it 0. After an overflow the trainer skips
        # the optimizer step.
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
    """Weights of the policy term that correct for the difference between sampler and old policy.

                             ratio                                 shape     within    outside
        token_truncate       exp(old_bt - sampling_bt)             [B, T]    ratio     nearer bound
        token_mask           exp(old_bt - sampling_bt)             [B, T]    ratio     0
        sequence_truncate    exp( sum_t (old_bt - sampling_bt) )   [B, 1]    ratio     nearer bound
        sequence_mask        exp( sum_t (old_bt - sampling_bt) )   [B, 1]    ratio     0
        geometric_mask       exp( mean_t (old_bt - sampling_bt) )  [B, 1]    1         0

    The last two columns are the weight where the ratio is within the bounds, and outside of them.

    Without bounds, the mean of ratio * f over draws of the sampler is the mean of f over draws of
    the old policy: with ``sequence_...`` for any quantity f of a completion, with ``token_...`` for
    any f of one token after given tokens. Bounds make this inexact, and reduce the variance.
    ``geometric_mask`` does not weight: it drops completions that sampler and old policy rate too
    differently.

    ``truncate`` is TIS, truncated importance sampling: fengyao.notion.site/off-policy-rl. ``mask``
    is MIS, masked importance sampling: ringtech.notion.site/icepop.

    Args:
        old_logprobs_BT: the old log-probs.
        sampling_logprobs_BT: the sampling log-probs of the same tokens.
        mask_BT: True at the tokens to train on. Weights elsewhere are finite and mean nothing.
        correction: ``sampler_correction`` of :func:`policy_loss`, one of the five names above.
        lowest: ``sampler_correction_min``, the lower bound of the ratio. None: no bound.
        highest: ``sampler_correction_max``, the upper bound of the ratio. None: no bound.

    Returns:
        The weights, and a boolean tensor, True where a ratio was outside of the bounds. Both have
        the shape in the table, and no gradient.
    """
    log_ratio = _zero_outside(mask_BT, old_logprobs_BT.detach() - sampling_logprobs_BT.detach())
    if correction == "geometric_mask":
        # Unlike the product, the mean does not grow with the length: no completion is masked for
        # being long.
        log_ratio = _mean_of_tokens(log_ratio, mask_BT)
    elif correction.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    # clamp() needs at least one bound, and no ratio is below 0.
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
    """Mask ``[B, 1]``: True = the policy term of the completion is kept.

        False if  A_b < 0  and  mean_t (sampling_bt - lp_bt) > threshold      (in nats)

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).
    """
    # The mean estimates KL(sampler || policy now). A bad completion that the policy would hardly
    # sample any more teaches it little, and may destabilise it. A good completion always counts.
    difference_BT = _zero_outside(mask_BT, sampling_logprobs_BT.detach() - logprobs_BT.detach())
    kl_B1 = _mean_of_tokens(difference_BT, mask_BT)
    return (A_B1 >= 0) | (kl_B1 <= threshold)


def entropy_threshold(entropies_N: Tensor, fraction: float) -> Tensor:
    """Return the ``1 - fraction`` quantile of the entropies.

    Without tokens it is infinity, so that no token passes.

    Tokens of high entropy are the forks in a completion. With ``algorithm.top_entropy_quantile`` as
    the fraction, only these tokens have a policy term (arXiv 2506.01939): ``grpo.run.passes`` makes
    ``policy_mask_BT`` from this threshold.

    Args:
        entropies_N: ``[N]`` entropies of the tokens to train on, of all completions and ranks, in
            nats.
        fraction: above 0, at most 1.

    Returns:
        A scalar in nats, on the CPU; float64, or PyTorch's default dtype without tokens.
    """
    if len(entropies_N) == 0:
        return torch.tensor(torch.inf)
    # By numpy, because torch.quantile takes at most 16 million values.
    values = entropies_N.double().cpu().numpy()
    return torch.tensor(np.quantile(values, 1 - fraction))


def _mean_of_tokens(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean ``[B, 1]`` over the tokens of the mask; the values outside of it must be 0."""
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True)
    # A completion without tokens has the mean 0, not NaN.
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

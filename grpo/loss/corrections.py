"""Weights and masks of the policy term: for completions that another policy sampled, and for tokens of low entropy. Pure functions, constants.

Shapes: ``B`` rows (completions), ``T`` completion tokens, ``N`` tokens of all rows one after the other.
"""

import torch
from torch import Tensor

from grpo.choices import SamplerCorrection

Stats = dict[str, tuple[Tensor, Tensor]]
"""Name of a metric -> (sum over tokens or completions, their number)."""


def sampler_weights(
    old_logprobs_BT: Tensor,
    sampling_logprobs_BT: Tensor,
    mask_BT: Tensor,
    correction: SamplerCorrection,
    lowest: float | None,
    highest: float | None,
) -> tuple[Tensor, Stats]:
    """The weight of each token in the policy term, ``[B, T]``, which corrects for a sampler that is not quite the policy; and what it cuts.

    It is the probability under the policy as scored before the update, divided by the probability with which the sampler drew.
    ``token_...``: of each token. ``sequence_...``: of the whole completion, the product over its tokens, the same at each of them.
    Outside of the bounds (``None``: no bound) it is the nearest bound with ``..._truncate`` (truncated importance sampling, TIS), and 0
    with ``..._mask`` (masked importance sampling, MIS). Outside of the mask it means nothing.
    """
    log_ratio_BT = torch.where(mask_BT, old_logprobs_BT.detach() - sampling_logprobs_BT.detach(), 0.0)
    per_sequence = correction.startswith("sequence")
    if per_sequence:
        log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.clamp(max=80.0).exp()  # exp() overflows fp32 at 88
    bounded_BT = ratio_BT.clamp(-torch.inf if lowest is None else lowest, highest)
    is_cut_BT = ratio_BT != bounded_BT
    weight_BT = ratio_BT.masked_fill(is_cut_BT, 0.0) if correction.endswith("mask") else bounded_BT
    counted = (slice(None), slice(0, 1)) if per_sequence else slice(None)  # a completion counts once
    counted_mask = mask_BT.any(dim=1, keepdim=True) if per_sequence else mask_BT
    stats = {
        f"sampling/importance_sampling_ratio/{name}": (values_BT[counted][counted_mask].sum(), counted_mask.sum())
        for name, values_BT in {"mean": weight_BT, "cut": is_cut_BT}.items()
    }
    return weight_BT, stats


def kept_sequences(
    logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, A_B1: Tensor, mask_BT: Tensor, threshold: float
) -> tuple[Tensor, Stats]:
    """``[B, 1]`` booleans: False at completions that off-policy sequence masking (DeepSeek-V3.2) leaves out; and the share of these.

    They have a negative advantage, and the policy has moved away from the sampler by more than ``threshold`` nats: the mean over their
    tokens of the sampler's log-prob less the policy's.
    """
    difference_BT = torch.where(mask_BT, sampling_logprobs_BT.detach() - logprobs_BT.detach(), 0.0)
    kl_B1 = difference_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    kept_B1 = (A_B1 >= 0) | (kl_B1 <= threshold)
    has_tokens_B1 = mask_BT.any(dim=1, keepdim=True)
    return kept_B1, {"sampling/off_policy_masked": ((has_tokens_B1 & ~kept_B1).sum(), has_tokens_B1.sum())}


def entropy_threshold(entropies_N: Tensor, share: float) -> Tensor:
    """The entropy at or above which lies a ``share`` of the tokens: the quantile ``1 - share``, as by ``torch.quantile``.

    That function takes at most 16 million values. Infinite if there are no tokens.
    """
    if not len(entropies_N):
        return torch.tensor(torch.inf)
    sorted_N, rank = entropies_N.double().sort().values, (1 - share) * (len(entropies_N) - 1)
    below = int(rank)
    return torch.lerp(sorted_N[below], sorted_N[min(below + 1, len(sorted_N) - 1)], rank - below)

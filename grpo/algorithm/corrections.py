"""Weights and masks of the policy term: for completions that another policy sampled, and for tokens of low entropy. Pure functions, constants.

Shapes: ``B`` rows (completions), ``T`` completion tokens, ``N`` tokens of all rows one after the other.
"""

import torch
from torch import Tensor

from grpo.algorithm.choices import SamplerCorrection


def sampler_weights(
    old_logprobs_BT: Tensor,
    sampling_logprobs_BT: Tensor,
    mask_BT: Tensor,
    correction: SamplerCorrection,
    lowest: float | None = None,
    highest: float | None = 3.0,
) -> tuple[Tensor, Tensor]:
    """Weights of the policy term that correct for a sampler that is not quite the policy; and True at those that were outside of the bounds.

    A weight is the probability under the policy as scored before the update, divided by the probability with which the sampler drew.
    ``token_...``: ``[B, T]``, of each token. ``sequence_...``: ``[B, 1]``, of the whole completion, the product over its tokens.
    Outside of the bounds (``None``: no bound) it is the nearest bound with ``..._truncate`` (truncated importance sampling, TIS), and 0
    with ``..._mask`` (masked importance sampling, MIS). Outside of the mask it means nothing.
    """
    log_ratio = torch.where(mask_BT, old_logprobs_BT.detach() - sampling_logprobs_BT.detach(), 0.0)
    if correction.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.clamp(max=80.0).exp()  # exp() overflows fp32 at 88
    bounded = ratio.clamp(-torch.inf if lowest is None else lowest, highest)
    is_cut = ratio != bounded
    return ratio.masked_fill(is_cut, 0.0) if correction.endswith("mask") else bounded, is_cut


def off_policy_mask(
    logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, A_B1: Tensor, mask_BT: Tensor, threshold: float
) -> Tensor:
    """``[B, 1]`` booleans: False at completions that off-policy sequence masking (DeepSeek-V3.2) leaves out.

    They have a negative advantage, and the policy has moved away from the sampler by more than ``threshold`` nats: the mean over their
    tokens of the sampler's log-prob less the policy's.
    """
    difference_BT = torch.where(mask_BT, sampling_logprobs_BT.detach() - logprobs_BT.detach(), 0.0)
    kl_B1 = difference_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return (A_B1 >= 0) | (kl_B1 <= threshold)


def entropy_threshold(entropies_N: Tensor, share: float) -> Tensor:
    """The entropy at or above which lies a ``share`` of the tokens: the quantile ``1 - share``, as by ``torch.quantile``.

    That function takes at most 16 million values. Infinite if there are no tokens.
    """
    if not len(entropies_N):
        return torch.tensor(torch.inf)
    sorted_N, rank = entropies_N.double().sort().values, (1 - share) * (len(entropies_N) - 1)
    below = int(rank)
    return torch.lerp(sorted_N[below], sorted_N[min(below + 1, len(sorted_N) - 1)], rank - below)

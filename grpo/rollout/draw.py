"""Drawing a token: temperature, filters, and the inverse of the cumulative distribution.

With logits ``x_v``, temperature ``tau`` and one uniform number ``u`` in [0, 1) per row::

    weight_v = e^(x_v / tau - max_w x_w / tau)     at most 1, so that nothing overflows
    p_v      = weight_v / sum_w weight_w
    F_v      = sum_{w <= v} p_w
    token    = min {v : F_v > u}                   which is v with probability p_v

This is inverse transform sampling (Devroye 1986, Non-Uniform Random Variate Generation, ch. II.2).
A token is a function of its logits and of one number that is drawn ahead. It does not depend on the
state of a generator, which other draws would change.

R   rows
V   vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. Nothing is read from a model's ``generation_config.json``."""

    num_generations: int
    """Completions per problem."""
    max_completion_length: int
    """Limit on the tokens of a completion."""
    temperature: float = 1.0
    """0 means greedy decoding, in which the filters below have no effect."""
    top_p: float = 1.0
    """1 disables top-p."""
    top_k: int = 0
    """0 disables top-k."""
    min_p: float = 0.0
    """0 disables min-p."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion (:class:`grpo.rollout.Stops`)."""
    tokens_in_flight: int | None = None
    """Limit on the tokens of prompts and completions in the KV cache at once. Default: no limit."""

    @property
    def is_greedy(self) -> bool:
        """True if the token with the highest logit is taken, without a random number."""
        return not self.temperature > 0


def draw_tokens(
    logits_RV: Tensor,
    u_R: Tensor | None,
    sampling: SamplingParams,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: the first whose cumulative probability exceeds ``u_R``.

    Numbers in ``u_R`` are in [0, 1). If ``u_R`` is None, the token with the highest logit is taken.

    Returns tokens ``[R]`` and their log-probabilities ``[R]`` in nats, at the temperature and
    before the filters, as the loss scores them. Log-probabilities are 0 in greedy decoding, and
    NaN where the logits are NaN.
    """
    logits_RV = logits_RV.float()
    if u_R is None:
        token_R = logits_RV.argmax(dim=-1)  # the index of a NaN, if there is one
        logit_R = logits_RV.gather(1, token_R[:, None]).squeeze(1)
        return token_R, 0.0 * logit_R

    if sampling.temperature != 1.0:  # the division is a pass over all logits
        logits_RV = logits_RV / sampling.temperature
    logits_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    weights_RV = logits_RV.exp()
    filtered_RV = filter_probs(weights_RV, sampling)
    token_R, total_R = first_exceeding(filtered_RV, u_R)

    # log p_v = log weight_v - log sum_w weight_w. The sum is over all tokens, also those that the
    # filters took out: the policy whose gradient is computed has no filters.
    if filtered_RV is not weights_RV:
        total_R = weights_RV.sum(dim=-1, dtype=torch.float64)
    logit_R = logits_RV.gather(1, token_R[:, None]).squeeze(1)
    logprob_R = logit_R - total_R.log()
    return token_R, logprob_R.float()


def first_exceeding(
    weights_RV: Tensor,
    u_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the first index whose cumulative weight exceeds ``u_R * total``, and the total.

    Both results are ``[R]``. ``F_v > u`` is compared as ``sum_{w <= v} weight_w > u * total``,
    without a division by the total. The index of a weight of 0 is never returned.
    """
    # In fp32, rounding a sum of 150,000 weights would shift probabilities. The CPU adds up in fp64
    # by itself.
    if weights_RV.is_cuda:
        weights_RV = weights_RV.double()
    cumulative_RV = deterministic_cumsum(weights_RV)
    total_R = cumulative_RV[:, -1]
    # u * total can round up to the total, which no cumulative weight exceeds: stay below.
    below_total_R = torch.nextafter(total_R, torch.zeros_like(total_R))
    target_R = torch.minimum(u_R * total_R, below_total_R)
    token_R1 = torch.searchsorted(
        cumulative_RV,
        target_R[:, None],
        right=True,
    )
    # With NaN among the weights the index is V. The caller finds the NaN in the log-probability.
    token_R1 = token_R1.clamp(max=weights_RV.shape[1] - 1)
    return token_R1.squeeze(1), total_R


def filter_probs(
    probs_RV: Tensor,
    sampling: SamplingParams,
) -> Tensor:
    """Apply top-k, then top-p, then min-p: set the probabilities that a filter removes to 0.

    ==========  ========================================  ================================
    top-k       the k largest probabilities stay          Fan et al. 2018, arXiv:1805.04833
    top-p       the smallest set with sum >= top_p stays  Holtzman et al. 2020, arXiv:1904.09751
    min-p       all p >= min_p * largest p stay           Nguyen et al. 2024, arXiv:2407.01082
    ==========  ========================================  ================================

    Each filter is a threshold, so tokens of equal probability stay or go together. The result is
    not renormalised. The probabilities of a row may be scaled by a positive factor, as long as they
    do not exceed 1: ``top_p`` is a fraction of the row's sum. If all filters are disabled,
    ``probs_RV`` itself is returned.
    """
    if 0 < sampling.top_k < probs_RV.shape[1]:
        threshold_R1 = probs_RV.topk(sampling.top_k).values[:, -1:]
        probs_RV = torch.where(probs_RV >= threshold_R1, probs_RV, 0.0)
    if sampling.top_p < 1.0:
        sorted_RV = probs_RV.sort(dim=-1, descending=True).values
        # A token stays if the tokens before it do not reach top_p.
        before_RV = deterministic_cumsum(sorted_RV) - sorted_RV
        total_R1 = sorted_RV.sum(dim=-1, keepdim=True)
        is_kept_RV = before_RV < sampling.top_p * total_R1
        num_kept_R1 = is_kept_RV.sum(dim=-1, keepdim=True)
        last_R1 = num_kept_R1.clamp(min=1) - 1  # one stays, also among NaN
        threshold_R1 = sorted_RV.gather(1, last_R1)
        probs_RV = torch.where(probs_RV >= threshold_R1, probs_RV, 0.0)
    if sampling.min_p > 0.0:
        threshold_R1 = sampling.min_p * probs_RV.amax(dim=-1, keepdim=True)
        probs_RV = torch.where(probs_RV >= threshold_R1, probs_RV, 0.0)
    return probs_RV


def deterministic_cumsum(x_RV: Tensor) -> Tensor:
    """``cumsum`` along rows that also runs on CUDA with ``runtime.deterministic``.

    With that setting PyTorch refuses every ``cumsum`` on CUDA. But only the kernel for a single row
    (CUB's scan) can give different bits. The kernel for a matrix has a fixed order
    (``ScanUtils.cuh``), so a single row is computed as a matrix of two rows.
    """
    mode = torch.get_deterministic_debug_mode()
    if not (x_RV.is_cuda and mode):
        return x_RV.cumsum(dim=-1)
    torch.set_deterministic_debug_mode(0)
    try:
        R = len(x_RV)
        if R == 1:
            x_RV = x_RV.repeat(2, 1)
        return x_RV.cumsum(dim=-1)[:R]
    finally:
        torch.set_deterministic_debug_mode(mode)

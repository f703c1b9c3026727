"""Sampling of a token: settings, filters, inverse of the cumulative distribution.

Shapes: ``R`` rows, ``V`` vocabulary.
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
    """In tokens."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a completion, and stay in it. A special token is found by its id
    (:class:`Stops`)."""
    tokens_in_flight: int | None = None
    """Most tokens (of prompts and completions) in the KV cache at once; None: no limit."""

    @property
    def is_greedy(self) -> bool:
        return not self.temperature > 0

    @property
    def is_filtered(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def draw_tokens(
    logits_RV: Tensor,
    u_R: Tensor | None,
    sampling: SamplingParams,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: the first whose cumulative probability exceeds ``u_R`` in [0, 1).

    ``u_R`` None: the token with the highest logit.

    Returns tokens ``[R]`` and their log-probabilities ``[R]`` in nats, at the temperature and
    before the filters, as the loss scores them. Log-probabilities are 0 in greedy decoding, and
    NaN where the logits are NaN.
    """
    logits_RV = logits_RV.float()
    if u_R is None:
        token_R = logits_RV.argmax(dim=-1)  # the index of a NaN, if there is one
        logit_R = logits_RV.gather(1, token_R[:, None]).squeeze(1)
        return token_R, 0.0 * logit_R

    if sampling.temperature != 1.0:  # a pass over all logits
        logits_RV = logits_RV / sampling.temperature
    logits_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    weights_RV = logits_RV.exp()
    kept_RV = filter_probs(weights_RV, sampling)
    token_R, total_R = first_exceeding(kept_RV, u_R)

    if sampling.is_filtered:
        total_R = weights_RV.sum(
            dim=-1,
            dtype=torch.float64,
        )
    logit_R = logits_RV.gather(1, token_R[:, None]).squeeze(1)
    logprob_R = logit_R - total_R.log()
    return token_R, logprob_R.float()


def first_exceeding(
    probs_RV: Tensor,
    u_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative probability exceeds ``u_R`` times the total, and the total.

    ``[R]`` each. No index is that of an impossible token.
    """
    if probs_RV.is_cuda:  # the CPU adds up in fp64 by itself
        probs_RV = probs_RV.double()
    cdf_RV = deterministic_cumsum(probs_RV)
    total_R1 = cdf_RV[:, -1:]
    # u * total can round up to the total, which would select an index behind the last possible
    # token: stay below.
    below_total_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    target_R1 = u_R[:, None] * total_R1
    target_R1 = torch.minimum(target_R1, below_total_R1)
    token_R1 = torch.searchsorted(
        cdf_RV,
        target_R1,
        right=True,
    )
    token_R1 = token_R1.clamp(max=probs_RV.shape[1] - 1)  # NaN gives the index behind it
    return token_R1.squeeze(1), total_R1.squeeze(1)


def filter_probs(
    probs_RV: Tensor,
    sampling: SamplingParams,
) -> Tensor:
    """Set probabilities outside top-k, top-p and min-p, in this order, to 0.

    The others are not renormalised. Each filter keeps all probabilities of at least a number, so
    that tokens of equal probability stay or go together. The probabilities may be multiplied by any
    number that leaves them at most 1.
    """
    if 0 < sampling.top_k < probs_RV.shape[1]:
        least_R1 = probs_RV.topk(sampling.top_k).values[:, -1:]
        probs_RV = torch.where(probs_RV >= least_R1, probs_RV, 0.0)
    if sampling.top_p < 1.0:
        sorted_RV = probs_RV.sort(dim=-1, descending=True).values
        before_RV = deterministic_cumsum(sorted_RV) - sorted_RV
        total_R1 = sorted_RV.sum(dim=-1, keepdim=True)
        is_kept_RV = before_RV < sampling.top_p * total_R1
        num_kept_R1 = is_kept_RV.sum(dim=-1, keepdim=True)
        least_R1 = sorted_RV.gather(1, num_kept_R1.clamp(min=1) - 1)
        probs_RV = torch.where(probs_RV >= least_R1, probs_RV, 0.0)
    if sampling.min_p > 0.0:
        least_R1 = sampling.min_p * probs_RV.amax(dim=-1, keepdim=True)
        probs_RV = torch.where(probs_RV >= least_R1, probs_RV, 0.0)
    return probs_RV


def deterministic_cumsum(x_RV: Tensor) -> Tensor:
    """``cumsum`` along rows that also runs on CUDA with ``runtime.deterministic``.

    PyTorch refuses every ``cumsum`` on CUDA then, but only the kernel for a single row (CUB's scan)
    can give different bits. The kernel for a matrix has a fixed order (``ScanUtils.cuh``): a single
    row is computed as a matrix of two.
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

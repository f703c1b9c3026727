"""How a token is drawn: settings, filters, and the inverse of the CDF at a uniform number.

Shapes: ``R`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. Every value is explicit: nothing is read from a model's ``generation_config.json``."""

    num_generations: int
    max_completion_length: int
    """In tokens."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    tokens_in_flight: int | None = None


def draw(logits_RV: torch.Tensor, u_R: torch.Tensor | None, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverting the CDF at ``u``.

    Args:
        logits_RV: ``[R, V]`` logits.
        u_R: ``[R]`` uniform numbers in [0, 1); None for greedy.
        sampling: temperature and filters.

    Returns:
        Tokens ``[R]`` and their log-probabilities ``[R]`` (nats, at the temperature, before top-k/top-p/min-p: what the loss
        scores).
    """
    if u_R is None:
        token_R = logits_RV.argmax(dim=-1)
        return token_R, torch.zeros_like(token_R, dtype=torch.float32)
    logits_RV = logits_RV.float() if sampling.temperature == 1.0 else logits_RV.float() / sampling.temperature
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    probs_RV = keep_likely(logprobs_RV.exp(), sampling)
    cdf_RV = sums_so_far(probs_RV)
    total_R1 = cdf_RV[:, -1:]
    # Just below the total at most: u * total can round up to it, and would fall behind the last possible token.
    target_R1 = torch.minimum(u_R[:, None] * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    token_R = torch.searchsorted(cdf_RV, target_R1, right=True).squeeze(1)
    return token_R, logprobs_RV.gather(1, token_R[:, None]).squeeze(1)


def keep_likely(probs_RV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities with those outside top-k, top-p and min-p set to 0 (not renormalised), applied in that order."""
    V = probs_RV.shape[-1]
    top_k = sampling.top_k if 0 < sampling.top_k < V else 0
    if not top_k and sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return probs_RV
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    keep_RV = torch.ones_like(sorted_RV, dtype=torch.bool)
    if top_k:
        keep_RV[:, top_k:] = False
    if sampling.top_p < 1.0:
        kept_RV = sorted_RV * keep_RV
        before_RV = (sums_so_far(kept_RV) - kept_RV) / kept_RV.sum(dim=-1, keepdim=True)
        keep_RV &= before_RV < sampling.top_p  # the smallest set that reaches top_p; never empty
    if sampling.min_p > 0.0:
        keep_RV &= sorted_RV >= sampling.min_p * sorted_RV[:, :1]
    return torch.zeros_like(probs_RV).scatter(-1, order_RV, sorted_RV * keep_RV)


def sums_so_far(x_RV: torch.Tensor) -> torch.Tensor:
    """``cumsum`` along rows, also on CUDA with ``runtime.deterministic``.

    PyTorch refuses it then, though only the kernel for a single row (CUB's scan) gives other bits another time; that for the rows
    of a matrix adds in a fixed order (``aten/src/ATen/native/cuda/ScanUtils.cuh``).
    """
    if not (x_RV.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x_RV.cumsum(dim=-1)
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return (x_RV if len(x_RV) > 1 else x_RV.repeat(2, 1)).cumsum(dim=-1)[: len(x_RV)]
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)

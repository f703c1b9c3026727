"""The check that CUDA graphs compute what the decode loop computes: both score the tokens that the graphs drew.

Sampled tokens cannot be compared. Two correct decoders draw different tokens where the uniform number lies within
rounding of the boundary between two tokens, and in bf16 at high entropy most rows meet such a boundary soon.

Shapes: ``R`` rows, ``T`` tokens that are checked, ``V`` vocabulary.
"""

from __future__ import annotations

import torch

from grpo.model import Policy
from grpo.rollout.decode_loop import Decoded, Prefill, Prompts
from grpo.rollout.draw import SamplingParams, deterministic_cumsum, filter_probs

NUM_TOKENS = 17
"""Tokens of each row that are checked: the first shape of the graphs, and usually the second."""
ENOUGH = 32
"""Least tokens behind the first ones of all rows that a check needs. (The first come from the prefill.)"""
NOISE_ROWS = 8
"""Rows from which the rounding noise is measured."""
LEAST_NOISE = {"fp32": 2e-5, "bf16": 4e-3}
"""In nats, where less is measured."""
MOST_NOISE = 2.0
"""Times the mean noise: more on average over all tokens is a mistake."""
MOST_NOISE_OF_ROW = 8.0
"""Times the mean noise: more on average over the tokens of one row is a mistake."""


def agrees_with_loop(
    policy: Policy, prefill: Prefill, prompts: Prompts, decoded: Decoded, uniforms_RT, sampling: SamplingParams
) -> bool:
    """True if the decode loop's steps give the first tokens of ``decoded`` the same log-probs, and draw them, up to
    rounding.

    The noise that rounding causes is measured: as the difference between the log-probs of the decode steps and of a
    forward pass without cache. It grows with the spread of the logits, and depends on the precision of products (TF32,
    bf16).
    """
    T = min(NUM_TOKENS, sampling.max_completion_length)
    tokens_RT = decoded.tokens_RT[:, :T].to(policy.device)
    logprobs_RT, missed_RT = _scored_by_steps(prefill, prompts, tokens_RT, uniforms_RT, sampling)
    off_RT = missed_RT
    if not sampling.is_greedy:
        off_RT = torch.maximum(missed_RT, (decoded.logprobs_RT[:, :T] - logprobs_RT).abs())
    written_RT = torch.arange(T) < torch.tensor(decoded.lengths)[:, None]
    chosen = range(0, len(prompts), -(-len(prompts) // NOISE_ROWS))
    noise = []
    for r in chosen:
        u_T = None if uniforms_RT is None else uniforms_RT[r, :T]
        scored_T = _scored_by_pass(policy, prompts[r], tokens_RT[r], u_T, sampling)
        noise.append((scored_T - logprobs_RT[r]).abs()[written_RT[r]])
    noise = max(float(torch.cat(noise).mean()), LEAST_NOISE[policy.precision])
    # Rows of few tokens count as rows of 8: one improbable token has much noise.
    of_rows_R = (off_RT * written_RT).sum(dim=1) / written_RT.sum(dim=1).clamp(min=min(8, T))
    # Written so that NaN does not agree.
    return (
        float(off_RT[written_RT].mean()) <= MOST_NOISE * noise and float(of_rows_R.max()) <= MOST_NOISE_OF_ROW * noise
    )


def score(
    logits_RV: torch.Tensor, token_R: torch.Tensor, u_R: torch.Tensor | None, sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-prob of each token at the temperature (greedy: at 1), in nats, and by how much
    :func:`~grpo.rollout.draw.draw` misses it.

    A token is drawn if the uniform number lies in the token's interval of the cumulative distribution. The miss is the
    distance from this interval; for greedy decoding, the distance from the greatest log-prob.
    """
    logprobs_RV = torch.log_softmax(logits_RV.float() / (1.0 if sampling.is_greedy else sampling.temperature), dim=-1)
    logprob_R = logprobs_RV.gather(1, token_R[:, None]).squeeze(1)
    if u_R is None:
        return logprob_R, logprobs_RV.amax(dim=-1) - logprob_R
    probs_RV = filter_probs(logprobs_RV.exp(), sampling)
    cdf_RV = deterministic_cumsum(probs_RV)
    end_R, total_R = cdf_RV.gather(1, token_R[:, None]).squeeze(1), cdf_RV[:, -1]
    start_R, target_R = end_R - probs_RV.gather(1, token_R[:, None]).squeeze(1), u_R * total_R
    return logprob_R, (torch.maximum(start_R - target_R, target_R - end_R) / total_R).clamp(min=0.0)


def _scored_by_steps(
    prefill: Prefill, prompts: Prompts, tokens_RT, uniforms_RT, sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[R, T]`` log-probs and misses by the decode steps of the loop, on the CPU."""
    decoder, logits_RV = prefill(prompts, tokens_RT.shape[1])
    scores = []
    for t, token_R in enumerate(tokens_RT.unbind(dim=1)):
        if t > 0:
            logits_RV = decoder.step(tokens_RT[:, t - 1])
        scores.append(score(logits_RV, token_R, None if uniforms_RT is None else uniforms_RT[:, t], sampling))
    logprobs, missed = zip(*scores, strict=True)
    return torch.stack(logprobs, dim=1).cpu(), torch.stack(missed, dim=1).cpu()


def _scored_by_pass(policy: Policy, prompt: tuple[int, ...], tokens_T: torch.Tensor, u_T, sampling) -> torch.Tensor:
    """``[T]`` log-probs of a row's tokens by one forward pass without cache, on the CPU."""
    ids_1S = torch.cat([tokens_T.new_tensor(prompt), tokens_T[:-1]])[None]
    logits_TV = policy.model(input_ids=ids_1S, use_cache=False, logits_to_keep=len(tokens_T)).logits[0]
    return score(logits_TV, tokens_T, u_T, sampling)[0].cpu()

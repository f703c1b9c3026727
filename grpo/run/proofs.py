"""The check at a run's start that compiled log-probs are those of the plain code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from grpo.algorithm.logprobs import LOGITS_PER_CHUNK_ON_CUDA, CompletionScorer, score_hidden
from grpo.attention import fast_paths
from grpo.distributed import World
from grpo.model import Policy
from grpo.system import first_line

WIDTH = 64
"""Hidden size of the random head. It may be small, since compiled functions read logits alone."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2**-7}
"""Bounds of the root mean square of the differences, in standard deviations of the plain values.

A compiled gradient in bf16 may be rounded to the neighbour of the plain one, which is at most 2^-7
of it away. In fp32 the compiler adds up probabilities of the vocabulary in another order.
"""


def prove_update(
    world: World,
    policy: Policy,
    scorer: CompletionScorer,
    tokens_per_microbatch: int,
) -> list[str]:
    """Switch on compiled log-probs if they are right on all ranks, which call this together.

    Returns lines for the log: why compiled log-probs stay off, if they do.
    """
    if not fast_paths.may_use(world.device) or not scorer.plain_head:
        return []
    reason = "it failed on another rank"
    try:
        _compare(policy, scorer, tokens_per_microbatch)
        is_right = True
    except Exception as error:  # of a compiler that is not ours; or memory runs out
        is_right = False
        reason = first_line(error)
    if world.all_true(is_right):
        fast_paths.switch_on(fast_paths.SCORES)
        return []
    return [f"note      without {fast_paths.SCORES} ({reason})"]


def _compare(policy: Policy, scorer: CompletionScorer, tokens_per_microbatch: int) -> None:
    """Score random hidden states with a random head; ArithmeticError if compiled results differ.

    Vocabulary and precision are the run's. The numbers of tokens are those of one chunk and of
    several, unless the run's micro-batches have fewer.
    """
    weight = scorer.model.get_output_embeddings().weight
    head = nn.utils.skip_init(
        nn.Linear,
        WIDTH,
        weight.shape[0],
        bias=False,
        device=policy.device,
        dtype=weight.dtype,
    )
    generator = torch.Generator(policy.device).manual_seed(0)
    nn.init.normal_(head.weight, std=2 / WIDTH**0.5, generator=generator)
    chunk = LOGITS_PER_CHUNK_ON_CUDA // head.out_features
    for tokens in (chunk, 3 * chunk):
        tokens = min(tokens, tokens_per_microbatch)
        tokens = max(tokens, 2)  # a single token is never compiled
        hidden_NH = torch.randn(
            (tokens, WIDTH),
            generator=generator,
            device=policy.device,
        )
        labels_N = torch.randint(
            head.out_features,
            (tokens,),
            generator=generator,
            device=policy.device,
        )
        found = []
        for parts in ((), (fast_paths.SCORES,)):
            with fast_paths.only(*parts):
                found.append(_results(policy, head, hidden_NH, labels_N, scorer.temperature))

        for plain, fast in zip(*found, strict=True):
            error = (fast - plain).square().mean().sqrt()
            difference = float(error / plain.std())
            if not difference <= TOLERANCE[policy.precision]:
                raise ArithmeticError(f"results differ by {difference:.2g} standard deviations")


def _results(
    policy: Policy,
    head: nn.Linear,
    hidden_NH: Tensor,
    labels_N: Tensor,
    temperature: float,
) -> list[Tensor]:
    """Compute log-probs, entropies, and the gradients of hidden states and head, all in fp64."""
    hidden_NH = hidden_NH.clone().requires_grad_()
    with policy.autocast():
        logprobs_N, entropies_N = score_hidden(head, hidden_NH, labels_N, None, temperature)
    # Outside of autocast, as in a run: inside, the gradient would be compiled apart on CUDA.
    loss = logprobs_N.square().sum()
    gradients = torch.autograd.grad(loss, [hidden_NH, head.weight])
    return [x.double() for x in (logprobs_N.detach(), entropies_N, *gradients)]

"""The check at a run's start that compiled log-probs are those of the plain code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from grpo.algorithm.logprobs import CompletionScorer, score_hidden, tokens_per_chunk
from grpo.attention import fast_paths
from grpo.distributed import World
from grpo.model import Policy

WIDTH = 64
"""Hidden size of the random head. What is compiled sees logits alone."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2**-7}
"""Most root mean square of the differences, in standard deviations of the plain values.

A gradient in bf16 may be rounded to the neighbour of the plain one, at most 2^-7 of it away. In
fp32 the sums over the vocabulary are added up in another order.
"""


def prove_update(
    world: World,
    policy: Policy,
    scorer: CompletionScorer,
    tokens_per_microbatch: int,
) -> list[str]:
    """Switch on compiled log-probs if they are right on all ranks; else return a line that says why not.

    All ranks call it together.
    """
    if not fast_paths.may_use(world.device) or not scorer.plain_head:
        return []
    reason = "it failed on another rank"
    try:
        _compare(policy, scorer, tokens_per_microbatch)
        is_right = True
    except Exception as error:  # of a compiler that is not ours; or memory runs out
        is_right = False
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if world.all_true(is_right):
        fast_paths.switch_on(fast_paths.SCORES)
        return []
    return [f"note      without {fast_paths.SCORES} ({reason})"]


def _compare(policy: Policy, scorer: CompletionScorer, tokens_per_microbatch: int) -> None:
    """Score random hidden states with a random head, compiled and not; ArithmeticError if the results differ.

    Vocabulary, precision and numbers of tokens are the run's: those of one chunk, and, where a
    micro-batch has more, those of two.
    """
    run_head = scorer.model.get_output_embeddings()
    size = dict(in_features=WIDTH, out_features=run_head.weight.shape[0], bias=False)
    head = nn.utils.skip_init(nn.Linear, **size, device=policy.device, dtype=run_head.weight.dtype)
    generator = torch.Generator(policy.device).manual_seed(0)
    nn.init.normal_(head.weight, std=2 / WIDTH**0.5, generator=generator)
    with policy.autocast(), fast_paths.only(fast_paths.SCORES):
        chunk = tokens_per_chunk(head)

    for most in (chunk, chunk + chunk // 2):
        tokens = max(min(most, tokens_per_microbatch), 2)
        hidden_NH = torch.randn(tokens, WIDTH, generator=generator, device=policy.device)
        labels_N = torch.randint(head.out_features, (tokens,), generator=generator, device=policy.device)

        def results(*parts: str) -> list[Tensor]:
            """Log-probs, entropies and gradients, with these parts."""
            hidden_NH.requires_grad_().grad = head.weight.grad = None
            with policy.autocast(), fast_paths.only(*parts):
                logprobs_N, entropies_N = score_hidden(head, hidden_NH, labels_N, None, scorer.temperature)
                logprobs_N.square().sum().backward()
            return [logprobs_N.detach(), entropies_N, hidden_NH.grad, head.weight.grad]

        for plain, fast in zip(results(), results(fast_paths.SCORES), strict=True):
            difference = (fast.double() - plain.double()).square().mean().sqrt() / plain.double().std()
            if not difference <= TOLERANCE[policy.precision]:
                raise ArithmeticError(f"results differ by {difference:.2g} standard deviations")

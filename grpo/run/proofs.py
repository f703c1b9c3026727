"""Which fast paths of an update (:mod:`grpo.attention.fast_paths`) are right for a run's model."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.algorithm.batch import Batch, Completion, Group, Problem, collate
from grpo.algorithm.logprobs import CompletionScorer
from grpo.attention import fast_paths
from grpo.distributed import World, abandon_pass, is_sharded, share
from grpo.model import Policy

TOLERANCE = {"fp32": 1e-3, "bf16": 0.15}
"""Of :func:`fast_paths.prove`. In bf16 packed and padded rows differ by up to 0.06 (24 layers, random, on a CPU)."""


def prove_update(world: World, policy: Policy, scorer: CompletionScorer, tokens_per_microbatch: int) -> list[str]:
    """Switch on compiled log-probs if log-probs, entropies and gradients of norms and biases are the plain code's.

    Else returns a line that says why not. All ranks call it together.
    """
    fast_paths.switch_off(fast_paths.SCORES)
    if not fast_paths.may_use(world.device):
        return []
    if is_sharded(scorer):  # first without collectives, in which a rank whose compiler fails would leave the others
        logits = torch.randn(64, 99, generator=torch.Generator().manual_seed(0)).to(world.device)
        if notes := fast_paths.prove(fast_paths.SCORES, lambda: [_log_softmax(logits)], 1e-3, world.all_true):
            return notes
    if not scorer.plain_head:
        return []

    def scores_and_gradients() -> list[Tensor]:
        """Of two batches; gradients are those of weights of one dimension, under FSDP of this rank's share."""
        trained, found = [p for p in policy.model.parameters() if p.requires_grad], []
        try:
            for batch in (_random_batch(policy, 2, (7, 40, 1)), _random_batch(policy, 3, (33, 5, 60, 18))):
                with policy.autocast():
                    logprobs_BT, entropies_BT = scorer(*batch.scorer_inputs)
                (logprobs_BT * torch.arange(1.0, logprobs_BT.shape[1] + 1, device=policy.device)).sum().backward()
                found += [logprobs_BT[batch.completion_mask_BT].detach(), entropies_BT[batch.completion_mask_BT]]
                small = [p for p in trained if p.ndim == 1] or trained
                found.append(torch.cat([share(p.grad).flatten() for p in small if p.grad is not None]))
                policy.model.zero_grad()
        except Exception:
            if is_sharded(scorer):
                abandon_pass(scorer)
            raise
        finally:
            policy.model.zero_grad()
        return found

    return fast_paths.prove(fast_paths.SCORES, scores_and_gradients, TOLERANCE[policy.precision], world.all_true)


@fast_paths.compiled(fast_paths.SCORES)
def _log_softmax(logits_NV: Tensor) -> Tensor:
    return logits_NV.log_softmax(dim=-1)


def _random_batch(policy: Policy, num_prompts: int, lengths: tuple[int, ...]) -> Batch:
    """Prompts of random tokens, each with completions of these lengths."""
    V, rng = policy.model.get_input_embeddings().weight.shape[0], torch.Generator().manual_seed(num_prompts)
    longest = min((policy.context_length or 300) - max(lengths), 150)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(V, (n,), generator=rng).tolist())

    completions = [tuple(Completion(ids(n), "", finished=True) for n in lengths) for _ in range(num_prompts)]
    groups = [Group(Problem(u, "", ids(max(longest - 20 * u, 2))), rows) for u, rows in enumerate(completions)]
    return collate(groups, torch.zeros(num_prompts, len(lengths)), pad_id=policy.pad_id, device=policy.device)

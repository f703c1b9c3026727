"""Passes over a batch in micro-batches of ``tokens_per_microbatch`` tokens.

Shapes: ``B`` rows, ``T`` completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from grpo.algorithm.batch import Batch, microbatch_rows, microbatches
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import entropy_threshold
from grpo.distributed import reshard
from grpo.run.records import Learner


def rank_microbatches(
    learner: Learner,
    batch: Batch,
    *,
    packed: bool | None = None,
) -> Iterator[tuple[Batch, bool]]:
    """Yield ``(micro-batch, is_last)`` of this rank; under FSDP as many as on any other rank.

    Args:
        packed: prompts are computed once per group. Default: as the policy's scorer does.
    """
    if packed is None:
        packed = learner.bare_scorer.packed
    max_tokens = learner.tokens_per_microbatch
    num_passes = 0
    if learner.is_sharded:
        parts = microbatch_rows(batch, max_tokens, packed=packed)
        num_passes = int(learner.world.max(torch.tensor(len(parts))))
    return microbatches(batch, max_tokens, packed=packed, num_passes=num_passes)


def batch_logprobs(learner: Learner, scorer: CompletionScorer, batch: Batch) -> Tensor:
    """Log-probs of a whole batch without gradient, ``[B, T]`` fp32 nats."""
    logprobs_BT, _ = batch_logprobs_and_entropies(learner, scorer, batch)
    return logprobs_BT


@torch.no_grad()
def batch_logprobs_and_entropies(
    learner: Learner,
    scorer: CompletionScorer,
    batch: Batch,
) -> tuple[Tensor, Tensor]:
    """Log-probs, and the entropy of the distribution of each token, ``[B, T]`` each.

    Rows that are not computed (``Batch.computed_B``) have 0.
    """
    logprobs_BT = torch.zeros(batch.completion_mask_BT.shape, device=learner.world.device)
    entropies_BT = torch.zeros_like(logprobs_BT)
    # Positions in this batch: a minibatch has those of the whole step.
    batch = replace(batch, row_B=torch.arange(len(batch), device=logprobs_BT.device))
    with learner.policy.autocast():
        for micro, _ in rank_microbatches(learner, batch, packed=scorer.packed):
            micro_logprobs_BT, micro_entropies_BT = scorer(*micro.scorer_inputs)
            # The longest completion of these rows may be shorter than that of the batch.
            t = micro_logprobs_BT.shape[1]
            logprobs_BT[micro.row_B, :t] = micro_logprobs_BT
            entropies_BT[micro.row_B, :t] = micro_entropies_BT
    reshard(scorer)
    return logprobs_BT, entropies_BT


def top_entropy_mask(learner: Learner, batch: Batch) -> Tensor:
    """``[B, T]`` True at the share ``top_entropy_quantile`` of trained tokens with the most
    entropy.

    The share is that of the tokens of all ranks.
    """
    # Rows that are skipped would have entropy 0.
    every_row = replace(batch, computed_B=None)
    _, entropies_BT = batch_logprobs_and_entropies(learner, learner.bare_scorer, every_row)
    entropies_N = entropies_BT[batch.loss_mask_BT].cpu()
    gathered_N = torch.cat(learner.world.gather_objects(entropies_N))
    threshold = entropy_threshold(gathered_N, learner.config.algorithm.top_entropy_quantile)
    return batch.loss_mask_BT & (entropies_BT >= threshold.to(entropies_BT.device))

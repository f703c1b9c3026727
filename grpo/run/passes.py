"""Passes over a batch, which ``tokens_per_microbatch`` divides into micro-batches.

Shapes: ``B`` rows, ``T`` completion tokens, ``N`` trained tokens of all ranks.
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
    """Yield ``(micro-batch, is_last)`` for the batch of this rank. Under FSDP all ranks yield the
    same number of micro-batches.

    Args:
        packed: True if prompts are computed once per group. Default: as in the policy's scorer.
    """
    if packed is None:
        packed = learner.bare_scorer.is_packed
    max_tokens = learner.tokens_per_microbatch
    num_passes = 0
    if learner.is_sharded:
        # Each pass gathers the weights from all ranks. A rank with fewer micro-batches adds passes
        # without effect, or the others would wait for it forever.
        parts = microbatch_rows(batch, max_tokens, packed=packed)
        most_passes = learner.world.max(torch.tensor(len(parts)))
        num_passes = int(most_passes)
    return microbatches(batch, max_tokens, packed=packed, num_passes=num_passes)


def batch_logprobs(learner: Learner, scorer: CompletionScorer, batch: Batch) -> Tensor:
    """Log-probs ``[B, T]`` of all rows of a batch, in fp32 nats, without gradient."""
    logprobs_BT, _ = batch_logprobs_and_entropies(learner, scorer, batch)
    return logprobs_BT


@torch.no_grad()
def batch_logprobs_and_entropies(
    learner: Learner,
    scorer: CompletionScorer,
    batch: Batch,
) -> tuple[Tensor, Tensor]:
    """Log-probs of a batch's tokens and entropies of their distributions, ``[B, T]`` nats, without
    gradient.

    Rows that are not computed (``Batch.is_computed_B``) have 0.
    """
    device = learner.world.device
    logprobs_BT = torch.zeros(batch.completion_mask_BT.shape, device=device)
    entropies_BT = torch.zeros_like(logprobs_BT)
    # A minibatch numbers its rows by their position in the step. The results need the position in
    # this batch.
    rows_B = torch.arange(len(batch), device=device)
    batch = replace(batch, row_B=rows_B)
    with learner.policy.autocast():
        for micro, _ in rank_microbatches(learner, batch, packed=scorer.is_packed):
            micro_logprobs_BT, micro_entropies_BT = scorer(*micro.scorer_inputs)
            # A micro-batch is as wide as its longest completion, which may be narrower than the
            # batch.
            t = micro_logprobs_BT.shape[1]
            logprobs_BT[micro.row_B, :t] = micro_logprobs_BT
            entropies_BT[micro.row_B, :t] = micro_entropies_BT
    # FSDP would free the gathered weights at the end of a backward pass, but no backward pass
    # follows.
    reshard(scorer)
    return logprobs_BT, entropies_BT


def top_entropy_mask(learner: Learner, batch: Batch) -> Tensor:
    """Mask ``[B, T]``, True at the trained tokens with the highest entropy.

    These tokens are the fraction ``top_entropy_quantile`` of the trained tokens of all ranks.
    """
    # Rows of advantage 0 count too: if they were skipped, they would have entropy 0 and lower the
    # threshold.
    all_rows = replace(batch, is_computed_B=None)
    _, entropies_BT = batch_logprobs_and_entropies(learner, learner.bare_scorer, all_rows)
    rank_entropies_N = entropies_BT[batch.loss_mask_BT].cpu()
    # All ranks have one threshold. With a threshold per rank, the loss would depend on the number
    # of ranks.
    entropies_N = torch.cat(learner.world.gather_objects(rank_entropies_N))
    quantile = learner.config.algorithm.top_entropy_quantile
    threshold = entropy_threshold(entropies_N, quantile).to(entropies_BT.device)
    has_high_entropy_BT = entropies_BT >= threshold
    return batch.loss_mask_BT & has_high_entropy_BT

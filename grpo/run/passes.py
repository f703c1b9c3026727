"""Passes over a batch in micro-batches of ``tokens_per_microbatch`` tokens.

Shapes: ``B`` rows, ``T`` completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from grpo.algorithm.batch import Batch, microbatch_rows, microbatches, without_effect
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import entropy_threshold
from grpo.distributed import give_back
from grpo.run.records import Learner


def update_microbatches(learner: Learner, minibatch: Batch) -> Iterator[tuple[Batch, bool]]:
    """Yield ``(micro-batch, is_last)``.

    Under FSDP, a rank with fewer than another first yields some without effect.
    """
    packed = learner.bare_scorer.packed
    for _ in range(_num_missing(learner, minibatch, packed)):
        yield without_effect(minibatch), False
    yield from microbatches(minibatch, learner.tokens_per_microbatch, packed=packed)


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
    shape = batch.completion_mask_BT.shape
    logprobs_BT = torch.zeros(shape, device=learner.world.device)
    entropies_BT = torch.zeros(shape, device=learner.world.device)
    parts = microbatch_rows(batch, learner.tokens_per_microbatch, packed=scorer.packed)
    num_rows = sum(len(rows) for rows in parts)
    with learner.policy.autocast(), learner.reporter.bar("log-probs", num_rows, "row") as bar:
        for _ in range(_num_missing(learner, batch, scorer.packed)):
            scorer(*without_effect(batch).scorer_inputs)
        for rows in parts:
            logprobs_bt, entropies_bt = scorer(*batch.select(rows).scorer_inputs)
            # The longest completion of these rows may be shorter than that of the batch.
            t = logprobs_bt.shape[1]
            rows = rows.to(logprobs_bt.device)
            logprobs_BT[rows, :t] = logprobs_bt
            entropies_BT[rows, :t] = entropies_bt
            bar.update(len(rows))
    give_back(scorer)
    return logprobs_BT, entropies_BT


def top_entropy_mask(learner: Learner, batch: Batch) -> Tensor:
    """``[B, T]`` True at the share ``top_entropy_quantile`` of trained tokens with the most entropy.

    The share is that of the tokens of all ranks.
    """
    every_row = replace(batch, computed_B=None)
    _, entropies_BT = batch_logprobs_and_entropies(learner, learner.bare_scorer, every_row)
    entropies_N = entropies_BT[batch.loss_mask_BT].cpu()
    gathered_N = torch.cat(learner.world.gather_objects(entropies_N))
    share = learner.config.algorithm.top_entropy_quantile
    threshold = entropy_threshold(gathered_N, share).to(entropies_BT.device)
    return batch.loss_mask_BT & (entropies_BT >= threshold)


def _num_missing(learner: Learner, batch: Batch, packed: bool) -> int:
    """The number of micro-batches that this rank lacks beside another, if each is a collective."""
    if not learner.is_sharded:
        return 0
    count = len(microbatch_rows(batch, learner.tokens_per_microbatch, packed=packed))
    most = int(learner.world.max(torch.tensor(count)))
    return most - count

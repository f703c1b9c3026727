"""Passes over a batch in micro-batches of ``tokens_per_microbatch`` tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from grpo.algorithm.batch import Batch, microbatch_rows, microbatches, without_effect
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import entropy_threshold
from grpo.distributed import give_back
from grpo.run.state import Run


def update_microbatches(run: Run, minibatch: Batch) -> Iterator[tuple[Batch, bool]]:
    """``(micro-batch, is_last)``. Under FSDP a rank with fewer than another first has some without effect."""
    packed = run.bare_scorer.packed
    for _ in range(_num_missing(run, minibatch, packed)):
        yield without_effect(minibatch), False
    yield from microbatches(minibatch, run.tokens_per_microbatch, packed=packed)


def batch_logprobs(run: Run, scorer: CompletionScorer, batch: Batch) -> Tensor:
    """Log-probs of a whole batch without gradient, ``[B, T]`` fp32 nats."""
    return batch_logprobs_and_entropies(run, scorer, batch)[0]


@torch.no_grad()
def batch_logprobs_and_entropies(run: Run, scorer: CompletionScorer, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same, and the entropy of the distribution of each token, ``[B, T]`` each; 0 at rows that are not computed."""
    logprobs_BT, entropies_BT = torch.zeros(2, *batch.completion_mask_BT.shape, device=run.world.device)
    parts = microbatch_rows(batch, run.tokens_per_microbatch, packed=scorer.packed)
    with run.policy.autocast(), run.reporter.bar("log-probs", sum(map(len, parts)), "row") as bar:
        for _ in range(_num_missing(run, batch, scorer.packed)):
            scorer(*without_effect(batch).scorer_inputs)
        for rows in parts:
            scored = scorer(*batch.select(rows).scorer_inputs)
            for whole_BT, scored_bt in zip((logprobs_BT, entropies_BT), scored, strict=True):
                whole_BT[rows.to(scored_bt.device), : scored_bt.shape[1]] = scored_bt
            bar.update(len(rows))
    give_back(scorer)
    return logprobs_BT, entropies_BT


def top_entropy_mask(run: Run, batch: Batch) -> Tensor:
    """``[B, T]`` True at the share ``algorithm.top_entropy_quantile`` of all trained tokens with the most entropy."""
    _, entropies_BT = batch_logprobs_and_entropies(run, run.bare_scorer, replace(batch, computed_B=None))
    gathered = run.world.gather_objects(entropies_BT[batch.loss_mask_BT].cpu())
    threshold = entropy_threshold(torch.cat(gathered), run.config.algorithm.top_entropy_quantile)
    return batch.loss_mask_BT & (entropies_BT >= threshold.to(entropies_BT.device))


def _num_missing(run: Run, batch: Batch, packed: bool) -> int:
    """The number of micro-batches that this rank lacks beside another; 0 unless each pass is a collective."""
    if not run.is_sharded:
        return 0
    count = len(microbatch_rows(batch, run.tokens_per_microbatch, packed=packed))
    return int(run.world.max(torch.tensor(count))) - count

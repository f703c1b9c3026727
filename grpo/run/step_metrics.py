"""The metrics of a step, and the completions that are kept of it.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from grpo.advantages import has_equal_rewards
from grpo.batch import Batch, Group
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.histograms import RATIO_EDGES
from grpo.telemetry.samples import sample_records

if TYPE_CHECKING:
    from grpo.run.state import Run


def step_line(
    run: Run,
    step: int,
    groups: Sequence[Group],
    all_values_PGF: torch.Tensor,
    all_rewards_PG: torch.Tensor,
    metrics: Accumulator,
    seconds: dict[str, float],
    step_time: float,
) -> dict[str, float]:
    """The object of a (1-based) step in ``metrics.jsonl``: one reduction over ranks.

    Args:
        groups: this rank's; rewards are of all ranks.
        seconds: of each phase on this rank, and ``step_time`` of the whole; the slowest rank's are reported.
    """
    completion_metrics(groups, metrics)
    for phase, value in seconds.items():
        metrics.maximum(f"time/{phase}", value)
    metrics.maximum("step_time", step_time)
    reduced = metrics.reduce(run.world)
    run.num_tokens = reduced["num_tokens"] = run.num_tokens + int(reduced["num_tokens"])
    reduced["tokens_per_second"] = reduced.pop("completion_tokens") / reduced["step_time"]
    return {
        "step": step,
        "epoch": step / run.problems.steps_per_epoch,
        **reward_metrics(run.rewards.names, all_values_PGF, all_rewards_PG),
        **reduced,
    }


def reward_metrics(names: Sequence[str], values_PGF: torch.Tensor, totals_PG: torch.Tensor) -> dict[str, float]:
    """Reward statistics of the whole global batch (every rank has all of it)."""
    metrics = {"reward": _mean(totals_PG), "reward_std": _mean(_row_std(totals_PG))}
    metrics["frac_reward_zero_std"] = has_equal_rewards(totals_PG).float().mean().item()
    metrics["frac_unscorable"] = torch.isnan(totals_PG).float().mean().item()
    for f, name in enumerate(names):
        values = values_PGF[..., f]
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = _row_std(values.reshape(1, -1)).item()
    return metrics


def completion_metrics(groups: Sequence[Group], metrics: Accumulator) -> None:
    """Lengths, truncation and tokens of this rank's groups."""
    lengths = torch.tensor([len(c.ids) for group in groups for c in group.completions])
    truncated = torch.tensor([not c.finished for group in groups for c in group.completions])
    metrics.add_values("completions/mean_length", lengths.double())
    metrics.add_values("completions/clipped_ratio", truncated.double())
    metrics.maximum("completions/max_length", float(lengths.max()))
    metrics.minimum("completions/min_length", float(lengths.min()))
    metrics.total("completion_tokens", lengths.sum())
    prompt_tokens = sum(len(group.problem.prompt_ids) * len(group.completions) for group in groups)
    metrics.total("num_tokens", prompt_tokens + lengths.sum())


def _mean(values: torch.Tensor) -> float:
    return values[~torch.isnan(values)].mean().item() if (~torch.isnan(values)).any() else 0.0


def _row_std(values_PG: torch.Tensor) -> torch.Tensor:
    stds = [row[~torch.isnan(row)] for row in values_PG]
    return torch.stack([row.std() if len(row) > 1 else torch.zeros(()) for row in stds])


def first_pass_metrics(run: Run, metrics: Accumulator, micro: Batch, old_BT: torch.Tensor) -> None:
    """How far sampling and scoring are apart; the scored log-probs are kept for :func:`log_completions`."""
    difference_BT = (old_BT - micro.sampling_logprobs_BT).abs() * micro.completion_mask_BT
    metrics.add("sampling/logprob_difference", difference_BT.sum(), micro.completion_mask_BT.sum())
    run.old_logprobs.append((micro.row_B, old_BT))


def log_completions(
    run: Run,
    step: int,
    groups: Sequence[Group],
    batch: Batch,
    values_PGF: torch.Tensor,
    all_rewards_PG: torch.Tensor,
    all_advantages_PG: torch.Tensor,
    metrics: Accumulator,
) -> None:
    """Hand some completions of a (1-based) step to the reporter, with their tokens' log-probs before and after the step.

    Before: the old log-probs of the loss. The distributions are of all completions on all ranks.
    """
    old_BT = torch.zeros_like(batch.sampling_logprobs_BT)
    for rows_b, old_bt in run.old_logprobs:
        old_BT[rows_b, : old_bt.shape[1]] = old_bt
    run.old_logprobs.clear()
    if run.config.logging.wandb != "disabled":
        lengths_PG = run.world.gather_rows(torch.tensor([[len(c.ids) for c in group.completions] for group in groups]))
        if run.reporter.is_logged(step):
            run.reporter.histogram("reward", all_rewards_PG)
            run.reporter.histogram("advantage", all_advantages_PG)
            run.reporter.histogram("length", lengths_PG)
            run.reporter.histogram("ratio", (metrics.histograms["ratio_histogram"], RATIO_EDGES))
    if not run.config.logging.log_completions or not run.reporter.is_logged(step):
        return
    kept = replace(batch, old_logprobs_BT=old_BT).rows(slice(0, run.config.logging.log_completions))
    records = sample_records(
        groups,
        values_PGF,
        run.world.own_rows(all_rewards_PG),
        run.world.own_rows(all_advantages_PG),
        names=run.rewards.names,
        step=step,
        logprobs_BT=kept.old_logprobs_BT,
        updated_logprobs_BT=run.logprobs(run.bare_scorer, kept),
        ref_logprobs_BT=kept.ref_logprobs_BT,
        decode=run.policy.tokenizer.decode,
    )
    run.reporter.completions(step, records)

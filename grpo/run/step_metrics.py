"""The metrics of a step, and the completions that are kept of it.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from grpo.advantages import has_equal_rewards
from grpo.batch import Batch, Group
from grpo.loss import Stats, importance_ratio
from grpo.run.state import Run
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.histograms import RATIO_EDGES, ratio_histogram
from grpo.telemetry.samples import sample_records


def add_microbatch(
    run: Run,
    metrics: Accumulator,
    micro: Batch,
    new_BT: torch.Tensor,
    old_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    loss: tuple[torch.Tensor, torch.Tensor],
    stats: Stats,
    *,
    is_first_pass: bool,
) -> None:
    """Add one micro-batch's loss, entropy and statistics, and how far sampled and scored log-probs are apart.

    Args:
        new_BT, old_BT: ``[B, T]`` log-probs of the loss, nats, without gradient.
        loss: the micro-batch's loss sum and denominator.
        is_first_pass: the weights are those that sampled the completions.
    """
    metrics.add_all(stats)
    metrics.add("loss", *loss)
    metrics.add("entropy", entropy_BT.sum(), micro.completion_mask_BT.sum())
    if is_first_pass:
        difference_BT = (old_BT - micro.sampling_logprobs_BT).abs() * micro.completion_mask_BT
        metrics.add("sampling/logprob_difference", difference_BT.sum(), micro.completion_mask_BT.sum())
    if run.config.logging.wandb != "disabled":
        ratio_BT = importance_ratio(new_BT, old_BT, micro.loss_mask_BT, run.config.algorithm.importance_level)
        metrics.add("ratio_histogram", ratio_histogram(ratio_BT, micro.loss_mask_BT))


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
    """The object of a (1-based) step in ``metrics.jsonl``; one reduction over ranks.

    Args:
        groups: this rank's; rewards are of all ranks.
        seconds: of each phase on this rank; ``step_time`` of the whole step. The slowest rank's are reported.
    """
    add_completions(groups, metrics)
    for phase, value in seconds.items():
        metrics.maximum(f"time/{phase}", value)
    metrics.maximum("step_time", step_time)
    reduced = metrics.reduce(run.world)
    reduced["num_tokens"] = run.progress.num_tokens + int(reduced["num_tokens"])
    reduced["tokens_per_second"] = reduced.pop("completion_tokens") / reduced["step_time"]
    return {
        "step": step,
        "epoch": step / run.problems.steps_per_epoch,
        **reward_metrics(run.rewards.names, all_values_PGF, all_rewards_PG),
        **reduced,
    }


def reward_metrics(names: Sequence[str], values_PGF: torch.Tensor, totals_PG: torch.Tensor) -> dict[str, float]:
    """Reward statistics of the whole global batch; every rank has all of it."""
    metrics = {"reward": _mean(totals_PG), "reward_std": _mean(_row_std(totals_PG))}
    metrics["frac_reward_zero_std"] = has_equal_rewards(totals_PG).float().mean().item()
    metrics["frac_unscorable"] = torch.isnan(totals_PG).float().mean().item()
    for f, name in enumerate(names):
        values = values_PGF[..., f]
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = _row_std(values.reshape(1, -1)).item()
    return metrics


def add_completions(groups: Sequence[Group], metrics: Accumulator) -> None:
    """Add lengths, truncation and token counts of this rank's groups."""
    lengths = torch.tensor([len(c.ids) for group in groups for c in group.completions])
    truncated = torch.tensor([not c.finished for group in groups for c in group.completions])
    metrics.add_values("completions/mean_length", lengths.double())
    metrics.add_values("completions/clipped_ratio", truncated.double())
    metrics.maximum("completions/max_length", float(lengths.max()))
    metrics.minimum("completions/min_length", float(lengths.min()))
    metrics.total("completion_tokens", lengths.sum())
    prompt_tokens = sum(len(group.problem.prompt_ids) * len(group.completions) for group in groups)
    metrics.total("num_tokens", prompt_tokens + lengths.sum())


def report_histograms(
    run: Run,
    step: int,
    groups: Sequence[Group],
    all_rewards_PG: torch.Tensor,
    all_advantages_PG: torch.Tensor,
    metrics: Accumulator,
) -> None:
    """Hand wandb the distributions of rewards, advantages, lengths and importance ratios of a (1-based) step, over all ranks."""
    if run.config.logging.wandb == "disabled":
        return
    lengths_PG = run.world.gather_rows(torch.tensor([[len(c.ids) for c in group.completions] for group in groups]))
    if run.reporter.is_logged(step):
        run.reporter.histogram("reward", all_rewards_PG)
        run.reporter.histogram("advantage", all_advantages_PG)
        run.reporter.histogram("length", lengths_PG)
        run.reporter.histogram("ratio", (metrics.histograms["ratio_histogram"], RATIO_EDGES))


def kept_completions(
    run: Run,
    step: int,
    groups: Sequence[Group],
    batch: Batch,
    values_PGF: torch.Tensor,
    rewards_PG: torch.Tensor,
    advantages_PG: torch.Tensor,
) -> list[dict[str, Any]]:
    """Records of a few completions of a (1-based) step, scored once more under the updated weights; empty on steps that keep none.

    Args:
        batch: this rank's, with the old log-probs of the loss.
        values_PGF, rewards_PG, advantages_PG: of this rank's groups.
    """
    count = run.config.logging.log_completions
    if not count or not run.reporter.is_logged(step):
        return []
    kept = batch.select(slice(0, count))
    return sample_records(
        groups,
        values_PGF,
        rewards_PG,
        advantages_PG,
        names=run.rewards.names,
        step=step,
        logprobs_BT=kept.old_logprobs_BT,
        updated_logprobs_BT=run.logprobs(run.bare_scorer, kept),
        ref_logprobs_BT=kept.ref_logprobs_BT,
        decode=run.policy.tokenizer.decode,
    )


def _mean(values: torch.Tensor) -> float:
    return values[~torch.isnan(values)].mean().item() if (~torch.isnan(values)).any() else 0.0


def _row_std(values_PG: torch.Tensor) -> torch.Tensor:
    rows = [row[~torch.isnan(row)] for row in values_PG]
    return torch.stack([row.std() if len(row) > 1 else torch.zeros(()) for row in rows])

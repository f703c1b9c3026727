"""The metrics of a step, and the few completions of a step that are written to a file.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo.algorithm.advantages import Scores, has_equal_rewards
from grpo.algorithm.batch import Batch, Group
from grpo.algorithm.loss import importance_ratio, off_policy_mask, sampler_weights
from grpo.config.algorithm import AlgorithmConfig
from grpo.rewards import RewardResult
from grpo.run.state import Run
from grpo.system import UserError
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.histograms import RATIO_EDGES, ratio_histogram
from grpo.telemetry.samples import sample_records


def count_reward_failures(run: Run, result: RewardResult | None, metrics: Accumulator, *, is_whole_step: bool) -> None:
    """Count the completions that each function failed to score, and add the metrics that functions logged.

    Args:
        result: from this rank's rewards; None if this rank had nothing to score.
        is_whole_step: True for all completions of a step, False for substitutes of some groups: a function that fails on a single bad
            problem is not broken.

    Raises:
        UserError: on all ranks, if a function failed on every completion of the step.
    """
    names = run.rewards.names
    failures, rows = (result.failures, len(result.values)) if result else ([0] * len(names), 0)
    for name, count in zip(names, failures, strict=True):
        metrics.total(f"rewards/{name}/errors", count)
    logged = result.metrics if result else {}
    *failed, rows, num_logged = run.world.sum(torch.tensor([*failures, rows, len(logged)])).tolist()
    if num_logged:  # a function may log a metric on some ranks only, and all ranks must add the same names
        for name in sorted({name for of_rank in run.world.gather_objects(list(logged)) for name in of_rank}):
            metrics.add(name, *logged.get(name, (0.0, 0.0)))
    for name, count in zip(names, failed, strict=True):
        if is_whole_step and rows and count == rows:
            trace = result.first_traceback.get(name, "") if result else ""
            error = trace.rstrip().rpartition("\n")[2]  # the runner has printed the traceback
            raise UserError(f"reward {name!r} failed on all {rows} completions of this step: {error or 'timeout'}")


@torch.no_grad()
def add_microbatch(
    run: Run, metrics: Accumulator, micro: Batch, new_BT: Tensor, old_BT: Tensor, entropy_BT: Tensor, first_pass: bool
) -> None:
    """Add one micro-batch's entropy, importance ratios (for dashboards), and difference between sampled and scored log-probs.

    Args:
        new_BT, old_BT: ``[B, T]`` log-probs of the loss, nats.
        first_pass: this is the first pass over the batch; later passes have the same old log-probs, which count once.
    """
    algorithm, counted_BT = run.config.algorithm, micro.counted_BT
    metrics.add("entropy", (entropy_BT * counted_BT).sum(), counted_BT.sum())
    if first_pass:
        scored_BT = new_BT if algorithm.objective == "dppo_tv" else old_BT  # whose old log-probs are the sampler's
        difference_BT = (scored_BT - micro.sampling_logprobs_BT).abs() * counted_BT
        metrics.add("sampling/logprob_difference", difference_BT.sum(), counted_BT.sum())
    add_corrections(algorithm, metrics, micro, new_BT, old_BT)
    if run.config.logging.has_dashboards:
        ratio_BT = importance_ratio(new_BT, old_BT, micro.loss_mask_BT, algorithm.importance_level)
        metrics.add("ratio_histogram", ratio_histogram(ratio_BT, micro.loss_mask_BT))


def add_corrections(
    algorithm: AlgorithmConfig, metrics: Accumulator, micro: Batch, new_BT: Tensor, old_BT: Tensor
) -> None:
    """Add the weights of ``sampler_correction``, and the share of completions that ``off_policy_mask_threshold`` leaves out."""
    mask_BT, sampled_BT = micro.loss_mask_BT, micro.sampling_logprobs_BT
    has_tokens_B1 = mask_BT.any(dim=1, keepdim=True)
    if algorithm.sampler_correction != "none":
        bounds = algorithm.sampler_correction_min, algorithm.sampler_correction_max
        weights, is_cut = sampler_weights(old_BT, sampled_BT, mask_BT, algorithm.sampler_correction, *bounds)
        counted = has_tokens_B1 if algorithm.sampler_correction.startswith("sequence") else mask_BT
        name, found = "sampling/importance_sampling_ratio", weights[counted]
        metrics.add(f"{name}/mean", found.sum(), counted.sum())
        metrics.add(f"{name}/cut", is_cut[counted].sum(), counted.sum())
        metrics.minimum(f"{name}/min", float(found.min()) if len(found) else math.inf)
        metrics.maximum(f"{name}/max", float(found.max()) if len(found) else -math.inf)
    if algorithm.off_policy_mask_threshold is not None:
        A_B1, threshold = micro.advantages_B[:, None], algorithm.off_policy_mask_threshold
        is_left_out_B1 = ~off_policy_mask(new_BT, sampled_BT, A_B1, mask_BT, threshold)
        metrics.add("sampling/off_policy_masked", (is_left_out_B1 & has_tokens_B1).sum(), has_tokens_B1.sum())


def step_line(
    run: Run, groups: list[Group], all_scores: Scores, metrics: Accumulator, seconds: dict
) -> dict[str, float]:
    """The object of the current step for ``metrics.jsonl``, reduced over ranks.

    Args:
        groups: this rank's.
        all_scores: of all ranks.
        metrics: with the ``step_time`` of the whole step.
        seconds: of each phase on this rank; the slowest rank's are reported.
    """
    add_completions(groups, metrics)
    for phase, value in seconds.items():
        metrics.maximum(f"time/{phase}", value)
    reduced = metrics.reduce(run.world)
    reduced["num_tokens"] = run.progress.num_tokens + int(reduced["num_tokens"])
    reduced["tokens_per_second"] = reduced.pop("completion_tokens") / reduced["step_time"]
    rewards = reward_metrics(run.rewards.names, all_scores.values_PGF, all_scores.rewards_PG)
    rewards["frac_reward_zero_std"] = has_equal_rewards(all_scores.compared).float().mean().item()
    step = run.progress.step + 1
    return {"step": step, "epoch": step / run.problems.steps_per_epoch, **rewards, **reduced}


def reward_metrics(names: list[str], values_PGF: Tensor, totals_PG: Tensor) -> dict[str, float]:
    """Reward statistics of the whole global batch; every rank has all of it."""
    metrics = {"reward": _mean(totals_PG), "reward_std": _row_std(totals_PG.reshape(1, -1)).item()}
    metrics["reward_group_std"] = _mean(_row_std(totals_PG))
    metrics["frac_unscorable"] = torch.isnan(totals_PG).float().mean().item()
    for f, name in enumerate(names):
        values = values_PGF[..., f]
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = _row_std(values.reshape(1, -1)).item()
    return metrics


def add_completions(groups: list[Group], metrics: Accumulator) -> None:
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


def report_details(run: Run, groups: list[Group], batch: Batch, all_scores: Scores, metrics: Accumulator) -> None:
    """Report a complete step's histograms to dashboards (over all ranks), and write a few of this rank's completions to a file.

    Args:
        batch: this rank's, with the old log-probs of the loss.
        all_scores: of all ranks.
    """
    world, reporter, step = run.world, run.reporter, run.progress.step
    advantages_PG = batch.advantages_B.view(len(groups), -1).cpu()
    if run.config.logging.has_dashboards:
        lengths_PG = world.gather_rows(torch.tensor([[len(c.ids) for c in group.completions] for group in groups]))
        all_advantages_PG = world.gather_rows(advantages_PG)
        if reporter.is_logged(step):
            reporter.histogram("reward", all_scores.rewards_PG)
            reporter.histogram("advantage", all_advantages_PG)
            reporter.histogram("length", lengths_PG)
            reporter.histogram("ratio", (metrics.histograms["ratio_histogram"], RATIO_EDGES))
    # Under FSDP all ranks score: a forward pass is a collective. Only the main rank's records are written.
    scores = reporter.is_due(step) if run.is_sharded else reporter.is_logged(step)
    if run.config.logging.log_completions and scores:
        values_PGF, rewards_PG = world.own_rows(all_scores.values_PGF), world.own_rows(all_scores.rewards_PG)
        reporter.completions(step, logged_completions(run, groups, batch, values_PGF, rewards_PG, advantages_PG))


def logged_completions(
    run: Run, groups: list[Group], batch: Batch, values_PGF: Tensor, rewards_PG: Tensor, advantages_PG: Tensor
) -> list[dict[str, Any]]:
    """Records of a few completions of the step that is complete, scored once more under the updated weights."""
    kept = replace(batch.select(slice(0, run.config.logging.log_completions)), computed_B=None)
    return sample_records(
        groups,
        values_PGF,
        rewards_PG,
        advantages_PG,
        names=run.rewards.names,
        step=run.progress.step,
        logprobs_BT=kept.old_logprobs_BT,
        updated_logprobs_BT=run.logprobs(run.bare_scorer, kept),
        ref_logprobs_BT=kept.ref_logprobs_BT,
        decode=run.policy.tokenizer.decode,
    )


def _mean(values: Tensor) -> float:
    """The mean of the values that are not NaN; NaN if there is none. In float64, in which rewards of any size have a sum."""
    return values.double().nanmean().item()


def _row_std(values_PG: Tensor) -> Tensor:
    """``[P]`` the standard deviation (n - 1) of each row's values that are not NaN: 0 for a single value, NaN for none."""
    rows = [row[~torch.isnan(row)].double() for row in values_PG]
    stds = [row.std().item() if len(row) > 1 else 0.0 if len(row) else math.nan for row in rows]
    return torch.tensor(stds, dtype=torch.double)

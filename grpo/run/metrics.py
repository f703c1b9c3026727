"""The metrics of a step, and the few completions of a step that are written to a file.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.algorithm.advantages import has_equal_rewards
from grpo.algorithm.batch import Batch, Group
from grpo.algorithm.loss import off_policy_mask, sampler_weights
from grpo.config.algorithm import AlgorithmConfig
from grpo.run.passes import batch_logprobs
from grpo.run.state import Run
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.samples import sample_records
from grpo.turns.engine import TurnsEngine
from grpo.turns.metrics import add_turns

if TYPE_CHECKING:
    from grpo.run.step import Step


@torch.no_grad()
def add_microbatch(
    run: Run, step: Step, micro: Batch, new_BT: Tensor, old_BT: Tensor, entropy_BT: Tensor, *, is_first_pass: bool
) -> None:
    """Add one micro-batch's entropy, and the difference between sampled and scored log-probs.

    The first pass over the batch also stores the old log-probs; later passes have the same ones, which count once.

    Args:
        new_BT, old_BT: ``[B, T]`` log-probs of the loss, nats.
    """
    algorithm, counted_BT, metrics = run.config.algorithm, micro.counted_BT, step.metrics
    metrics.add("entropy", (entropy_BT * counted_BT).sum(), counted_BT.sum())
    if is_first_pass:
        step.old_BT[micro.row_B, : old_BT.shape[1]] = old_BT
        scored_BT = new_BT if algorithm.objective == "dppo_tv" else old_BT  # whose old log-probs are the sampler's
        difference_BT = (scored_BT - micro.sampling_logprobs_BT).abs() * counted_BT
        metrics.add("sampling/logprob_difference", difference_BT.sum(), counted_BT.sum())
    add_corrections(algorithm, metrics, micro, new_BT, old_BT)


def add_corrections(
    algorithm: AlgorithmConfig, metrics: Accumulator, micro: Batch, new_BT: Tensor, old_BT: Tensor
) -> None:
    """Add the weights of ``sampler_correction``, and the share of completions left out as off-policy."""
    mask_BT, sampled_BT = micro.loss_mask_BT, micro.sampling_logprobs_BT
    has_tokens_B1 = mask_BT.any(dim=1, keepdim=True)
    if algorithm.sampler_correction != "none":
        bounds = algorithm.sampler_correction_min, algorithm.sampler_correction_max
        weights, is_cut = sampler_weights(old_BT, sampled_BT, mask_BT, algorithm.sampler_correction, *bounds)
        counted = mask_BT if algorithm.sampler_correction.startswith("token") else has_tokens_B1
        name, found = "sampling/importance_sampling_ratio", weights[counted]
        metrics.add(f"{name}/mean", found.sum(), counted.sum())
        metrics.add(f"{name}/cut", is_cut[counted].sum(), counted.sum())
        metrics.minimum(f"{name}/min", float(found.min()) if len(found) else math.inf)
        metrics.maximum(f"{name}/max", float(found.max()) if len(found) else -math.inf)
    if algorithm.off_policy_mask_threshold is not None:
        A_B1, threshold = micro.advantages_B[:, None], algorithm.off_policy_mask_threshold
        is_left_out_B1 = ~off_policy_mask(new_BT, sampled_BT, A_B1, mask_BT, threshold)
        metrics.add("sampling/off_policy_masked", (is_left_out_B1 & has_tokens_B1).sum(), has_tokens_B1.sum())


def step_line(run: Run, step: Step) -> dict[str, float]:
    """The step's object for ``metrics.jsonl``, reduced over ranks; of each phase the seconds of the slowest rank."""
    add_completions(step.groups, step.metrics)
    if isinstance(run.engine, TurnsEngine):
        add_turns(step.groups, step.metrics, run.engine.tools.names)
    for phase, value in step.seconds.items():
        step.metrics.maximum(f"time/{phase}", value)
    reduced = step.metrics.reduce(run.world)
    reduced["num_tokens"] = run.progress.num_tokens + int(reduced["num_tokens"])
    reduced["tokens_per_second"] = reduced.pop("completion_tokens") / reduced["step_time"]
    rewards = reward_metrics(run.rewards.names, step.scores.values_PGF, step.scores.rewards_PG)
    rewards["frac_reward_zero_std"] = has_equal_rewards(step.scores.compared).float().mean().item()
    number = step.number + 1
    return {"step": number, "epoch": number / run.problems.steps_per_epoch, **rewards, **reduced}


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
    lengths = []
    num_truncated = 0
    num_tokens = 0
    for group in groups:
        for completion in group.completions:
            lengths.append(len(completion.sampled_ids))
            num_truncated += not completion.finished
            num_tokens += len(group.problem.prompt_ids)
            num_tokens += len(completion.ids)
    count = len(lengths)
    metrics.add("completions/mean_length", sum(lengths), count)
    metrics.add("completions/clipped_ratio", num_truncated, count)
    metrics.maximum("completions/max_length", float(max(lengths)))
    metrics.minimum("completions/min_length", float(min(lengths)))
    metrics.total("completion_tokens", sum(lengths))
    metrics.total("num_tokens", num_tokens)


def report_details(run: Run, step: Step) -> None:
    """Report a step's histograms over all ranks to dashboards, and write a few of this rank's completions."""
    world, reporter, number, groups = run.world, run.reporter, run.progress.step, step.groups
    advantages_PG = step.batch.advantages_B.view(len(groups), -1).cpu()
    if run.config.logging.has_dashboards:
        lengths = torch.tensor([[len(c.sampled_ids) for c in group.completions] for group in groups])
        lengths_PG = world.gather_rows(lengths)
        all_advantages_PG = world.gather_rows(advantages_PG)
        if reporter.is_logged(number):
            reporter.histogram("reward", step.scores.rewards_PG)
            reporter.histogram("advantage", all_advantages_PG)
            reporter.histogram("length", lengths_PG)
    # Under FSDP all ranks score: a forward pass is a collective. Only the main rank's records are written.
    scores = reporter.is_due(number) if run.is_sharded else reporter.is_logged(number)
    if run.config.logging.log_completions and scores:
        reporter.completions(number, logged_completions(run, step, advantages_PG))


def logged_completions(run: Run, step: Step, advantages_PG: Tensor) -> list[dict[str, Any]]:
    """Records of completions of the complete step, two of each problem if that is enough, scored by the new weights."""
    count, (P, G) = run.config.logging.log_completions, advantages_PG.shape
    pairs = [(p, g) for p in range(P) for g in range(min(max(2, math.ceil(count / P)), G))][:count]
    batch = replace(step.batch, old_logprobs_BT=step.old_BT, computed_B=None)
    rows = batch.select(torch.tensor([p * G + g for p, g in pairs]))
    return sample_records(
        step.groups,
        run.world.own_rows(step.scores.values_PGF),
        run.world.own_rows(step.scores.rewards_PG),
        advantages_PG,
        names=run.rewards.names,
        rows=pairs,
        step=run.progress.step,
        logprobs_BT=rows.old_logprobs_BT,
        updated_logprobs_BT=batch_logprobs(run, run.bare_scorer, rows),
        ref_logprobs_BT=rows.ref_logprobs_BT,
        decode=run.policy.tokenizer.decode,
    )


def _mean(values: Tensor) -> float:
    """The mean of the values that are not NaN; NaN if there is none. In float64: rewards may be large."""
    return values.double().nanmean().item()


def _row_std(values_PG: Tensor) -> Tensor:
    """``[P]`` standard deviation (n - 1) of each row's values that are not NaN: 0 for a single value, NaN for none."""
    rows = [row[~torch.isnan(row)].double() for row in values_PG]
    stds = [row.std().item() if len(row) > 1 else 0.0 if len(row) else math.nan for row in rows]
    return torch.tensor(stds, dtype=torch.double)

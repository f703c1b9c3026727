"""A run and its steps in words and numbers: the summary at the start, the metrics of a step.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo import memory
from grpo.advantages import has_equal_rewards
from grpo.batch import Batch, Group, Problem
from grpo.config import Config
from grpo.data import ProblemSet, count_shared
from grpo.loss import RATIO_EDGES
from grpo.metrics import Accumulator
from grpo.model import Policy, num_parameters
from grpo.samples import sample_records


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


def completion_metrics(groups: Sequence[Group], metrics: Accumulator) -> int:
    """Lengths and truncation into ``metrics``; the tokens of prompts and completions here."""
    lengths = torch.tensor([len(c.ids) for group in groups for c in group.completions])
    truncated = torch.tensor([not c.finished for group in groups for c in group.completions])
    metrics.add_values("completions/mean_length", lengths.double())
    metrics.add_values("completions/clipped_ratio", truncated.double())
    metrics.maximum("completions/max_length", float(lengths.max()))
    metrics.minimum("completions/min_length", float(lengths.min()))
    metrics.add("completion_tokens", lengths.sum(), 0)
    prompt_tokens = sum(len(group.problem.prompt_ids) * len(group.completions) for group in groups)
    return prompt_tokens + int(lengths.sum())


def _mean(values: torch.Tensor) -> float:
    return values[~torch.isnan(values)].mean().item() if (~torch.isnan(values)).any() else 0.0


def _row_std(values_PG: torch.Tensor) -> torch.Tensor:
    stds = [row[~torch.isnan(row)] for row in values_PG]
    return torch.stack([row.std() if len(row) > 1 else torch.zeros(()) for row in stds])


def first_pass_metrics(run, metrics: Accumulator, micro: Batch, old_BT: torch.Tensor) -> None:
    """How far sampling and scoring are apart; the scored log-probs are kept for :func:`log_completions`."""
    difference_BT = (old_BT - micro.sampling_logprobs_BT).abs() * micro.completion_mask_BT
    metrics.add("sampling/logprob_difference", difference_BT.sum(), micro.completion_mask_BT.sum())
    run.old_logprobs.append((micro.row_B, old_BT))


def log_completions(
    run, step: int, groups, batch: Batch, values_PGF, all_rewards_PG, all_advantages_PG, metrics: Accumulator
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


def summary(
    config: Config,
    *,
    num_parameters: int,
    device: str,
    world_size: int,
    train: ProblemSet,
    evaluation: Sequence[Problem],
    steps_per_epoch: int,
    max_steps: int,
) -> list[str]:
    """What is about to happen, and what could surprise, in a few lines."""
    a, r = config.algorithm, config.rollout
    left_out = ""
    if train.num_too_long:
        left_out += f", {train.num_too_long} left out as longer than {config.data.max_prompt_length} tokens"
    if train.num_empty:
        left_out += f", {train.num_empty} left out as empty"
    if train.num_without_answer:
        left_out += f", {train.num_without_answer} without an answer"
    rows = r.prompts_per_step * r.num_generations
    lines = [
        f"model     {config.model.name_or_path}, {num_parameters / 1e6:.2f}M parameters, "
        f"{config.runtime.precision} on {device}",
        f"data      {config.data.dataset}: {len(train.problems)} problems to train on{left_out}; "
        f"{len(evaluation)} to evaluate on",
        f"step      {r.prompts_per_step} problems x {r.num_generations} completions = {rows}, over {world_size} rank(s); "
        f"{a.updates_per_step} update(s) from them; {max_steps} steps, {steps_per_epoch} to an epoch",
        f"algorithm {a.name}: {a.objective}, baseline {a.baseline}, scale {a.scale}, {a.aggregation}, beta {a.beta:g}",
        f"output    {config.output_dir}; the same command continues it from its newest checkpoint",
    ]
    shared = count_shared(train.problems, evaluation)
    if shared:
        lines.append(f"warning: {shared} evaluation problems are also in the training data")
    if not evaluation:
        lines.append("note: no evaluation, since data.eval_split and data.eval_dataset are not set")
    if a.updates_per_step == 1:
        lines.append(
            "note: with one update per rollout the loss stays near 0 while its gradient does not: watch reward, not loss"
        )
    for key, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(r, key) != neutral:
            lines.append(
                f"warning: rollout.{key}={getattr(r, key)} samples from a cut distribution, but the whole one is scored: "
                "the gradient estimate is biased"
            )
    return lines


def memory_line(
    config: Config, policy: Policy, reference: torch.nn.Module | None, world_size: int, longest_prompt: int
) -> str:
    """What a rank will need, for the summary."""
    r, budget = config.rollout, config.optim.tokens_per_microbatch
    rows = r.prompts_per_step * r.num_generations // world_size
    most = rows * (longest_prompt + r.max_completion_length)
    return memory.line(
        memory.estimate(
            policy.model.config.get_text_config(),
            num_parameters(policy.model),
            precision=config.runtime.precision,
            reference_bytes=sum(p.numel() * p.element_size() for p in reference.parameters()) if reference else 0.0,
            gradient_checkpointing=config.model.gradient_checkpointing,
            is_on_cpu=policy.device.type == "cpu",
            tokens_in_flight=min(r.tokens_in_flight or most, most),
            tokens_per_microbatch=min(budget, most),
        )
    )

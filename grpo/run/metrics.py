"""The metrics of a step, and the few completions of a step that are written to a file.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo.algorithm.advantages import has_equal_rewards, values_compared
from grpo.algorithm.batch import Batch, Group
from grpo.config.algorithm import AlgorithmConfig
from grpo.run.passes import batch_logprobs
from grpo.run.records import Run, Step
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.samples import sample_records
from grpo.turns.metrics import add_turns


@torch.no_grad()
def record_microbatch(
    step: Step,
    algorithm: AlgorithmConfig,
    micro: Batch,
    new_BT: Tensor,
    old_BT: Tensor,
    entropy_BT: Tensor,
    is_first_iteration: bool,
) -> None:
    """Add a micro-batch's entropy to the metrics.

    The first iteration over the batch also adds the difference between sampled and scored
    log-probs, and keeps the old log-probs, which later passes share.

    Args:
        new_BT, old_BT: ``[B, T]`` log-probs of the loss, nats.
    """
    metrics = step.metrics
    counted_BT = micro.counted_BT
    count = counted_BT.sum()
    entropy = (entropy_BT * counted_BT).sum()
    metrics.add("entropy", entropy, count)
    if is_first_iteration:
        T = old_BT.shape[1]
        step.reported_old_BT[micro.row_B, :T] = old_BT
        # The old log-probs of dppo_tv are the sampler's own.
        trainer_BT = new_BT if algorithm.objective == "dppo_tv" else old_BT
        difference_BT = (trainer_BT - micro.sampling_logprobs_BT).abs()
        difference = (difference_BT * counted_BT).sum()
        metrics.add("sampling/logprob_difference", difference, count)


def step_line(run: Run, step: Step) -> dict[str, float]:
    """The step's object for ``metrics.jsonl``, over all ranks.

    Seconds of a phase are those of the slowest rank.
    """
    tasks = run.tasks
    add_completions(step.groups, step.metrics)
    if tasks.tools is not None:
        add_turns(step.groups, step.metrics, tasks.tools.key_of_tool)
    for phase, value in step.seconds.items():
        step.metrics.maximum(f"time/{phase}", value)
    reduced = step.metrics.reduce(run.world)
    # Tokens of the whole run so far.
    reduced["num_tokens"] = run.progress.num_tokens + int(reduced["num_tokens"])
    reduced["tokens_per_second"] = reduced.pop("completion_tokens") / reduced["step_time"]

    values_compared_in_group = values_compared(
        step.values_PGF,
        tasks.rewards.weights,
        run.config.algorithm.multi_objective_aggregation,
    )
    num_steps = step.number + 1
    line = {
        "step": num_steps,
        "epoch": num_steps / tasks.problems.steps_per_epoch,
    }
    line |= reward_metrics(tasks.rewards.names, step.values_PGF, step.rewards_PG)
    is_equal_P = has_equal_rewards(values_compared_in_group)
    line["frac_reward_zero_std"] = is_equal_P.float().mean().item()
    return line | reduced


def reward_metrics(
    names: Sequence[str],
    values_PGF: Tensor,
    rewards_PG: Tensor,
) -> dict[str, float]:
    """Reward statistics of the whole global batch; every rank has all of it."""
    unscored_PG = rewards_PG.isnan()
    metrics = {
        "reward": _mean(rewards_PG),
        "reward_std": _std(rewards_PG),
        "frac_unscorable": unscored_PG.float().mean().item(),
    }
    for f, name in enumerate(names):
        values_PG = values_PGF[..., f]
        metrics[f"rewards/{name}/mean"] = _mean(values_PG)
        metrics[f"rewards/{name}/std"] = _std(values_PG)
    return metrics


def add_completions(groups: Sequence[Group], metrics: Accumulator) -> None:
    """Add lengths, truncation and token counts of this rank's groups."""
    lengths = []
    num_truncated = 0
    num_tokens = 0
    for group in groups:
        prompt_length = len(group.problem.prompt_ids)
        for completion in group.completions:
            lengths.append(len(completion.sampled_ids))
            num_truncated += not completion.finished
            num_tokens += prompt_length
            num_tokens += len(completion.ids)
    count = len(lengths)
    metrics.add("completions/mean_length", sum(lengths), count)
    metrics.add("completions/clipped_ratio", num_truncated, count)
    metrics.maximum("completions/max_length", float(max(lengths)))
    metrics.minimum("completions/min_length", float(min(lengths)))
    metrics.total("completion_tokens", sum(lengths))
    metrics.total("num_tokens", num_tokens)


def report_completions(run: Run, step: Step) -> None:
    """Write a few of the main rank's completions."""
    number = run.progress.step
    is_due = run.config.logging.log_completions and run.log.reporter.is_due(number)
    # Under FSDP all ranks score: a forward pass is a collective.
    if is_due and (run.world.is_main or run.learner.is_sharded):
        run.log.reporter.completions(number, logged_completions(run, step))


def logged_completions(run: Run, step: Step) -> list[dict[str, Any]]:
    """Records of completions, two of each problem if that is enough, scored by the new weights."""
    world = run.world
    learner = run.learner
    count = run.config.logging.log_completions
    P = len(step.groups)
    G = len(step.batch) // P
    of_each = min(max(2, math.ceil(count / P)), G)
    pairs = [(p, g) for p in range(P) for g in range(of_each)]
    pairs = pairs[:count]
    # All rows are scored, also those that the update has skipped.
    batch = replace(step.batch, old_logprobs_BT=step.reported_old_BT, computed_B=None)
    indices = [p * G + g for p, g in pairs]
    rows = batch.select(torch.tensor(indices))
    updated_BT = batch_logprobs(learner, learner.bare_scorer, rows)
    return sample_records(
        step.groups,
        world.local_rows(step.values_PGF),
        world.local_rows(step.rewards_PG),
        step.batch.advantages_B.view(P, G).cpu(),
        names=run.tasks.rewards.names,
        rows=pairs,
        step=run.progress.step,
        logprobs_BT=rows.old_logprobs_BT,
        updated_logprobs_BT=updated_BT,
        ref_logprobs_BT=rows.ref_logprobs_BT,
        decode=learner.policy.tokenizer.decode,
    )


def _mean(values: Tensor) -> float:
    """The mean of the values that are not NaN, in float64: rewards may be large. NaN for none."""
    return values.double().nanmean().item()


def _std(values: Tensor) -> float:
    """Standard deviation (n - 1) of the values that are not NaN: 0 for a single one, NaN for
    none."""
    numbers = values[~values.isnan()].double()
    if len(numbers) == 1:
        return 0.0
    return numbers.std().item() if len(numbers) else math.nan

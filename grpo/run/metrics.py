"""The metrics of a step, and the few completions of a step that are written to a file.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from grpo.algorithm.advantages import has_equal_rewards, values_to_compare
from grpo.algorithm.batch import Batch, Group
from grpo.config.algorithm import AlgorithmConfig
from grpo.run.passes import batch_logprobs
from grpo.run.records import Run, Step
from grpo.system import UserError
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

    The first iteration over the batch also adds the difference between the log-probs from sampling
    and from scoring, and keeps the old log-probs for the records of completions.

    Args:
        new_BT, old_BT: ``[B, T]`` new and old log-probs of the loss, in nats.
    """
    counted_BT = micro.is_counted_BT
    count = counted_BT.sum()
    entropy = (entropy_BT * counted_BT).sum()
    step.metrics.add("entropy", entropy, count)
    # Later iterations have the same old log-probs.
    if not is_first_iteration:
        return

    if step.reported_old_BT is None:
        raise UserError("call step.keep_for_metrics(...) before the updates of a step")
    T = old_BT.shape[1]
    step.reported_old_BT[micro.row_B, :T] = old_BT
    # The old log-probs of dppo_tv come from the sampler, so their difference from the sampler's
    # would always be 0.
    trainer_BT = new_BT if algorithm.objective == "dppo_tv" else old_BT
    difference_BT = (trainer_BT - micro.sampling_logprobs_BT).abs()
    difference = (difference_BT * counted_BT).sum()
    step.metrics.add("sampling/logprob_difference", difference, count)


def step_line(run: Run, step: Step) -> dict[str, float]:
    """Return the object of a step for ``metrics.jsonl``, over all ranks.

    The seconds of a phase are the seconds of the slowest rank.
    """
    tasks = run.tasks
    metrics = step.metrics
    add_completions(step.groups, metrics)
    if run.config.uses_turns:
        add_turns(step.groups, metrics, tasks.tools.key_of_tool)
    for phase, seconds in step.seconds.items():
        metrics.maximum(f"time/{phase}", seconds)
    # Everything added so far is of this rank alone.
    reduced = metrics.reduce(run.world)
    # The maximum of negated lengths.
    reduced["completions/min_length"] *= -1
    reduced["num_tokens"] = run.progress.num_tokens + int(reduced["num_tokens"])
    # The rate is the tokens of all ranks divided by the seconds of the slowest rank. A mean of the
    # ranks' rates would be another number.
    reduced["tokens_per_second"] = reduced.pop("completion_tokens") / reduced["step_time"]

    # The rewards of all ranks were gathered for the advantages, so every rank computes the same
    # numbers from all rewards.
    num_steps = step.number + 1
    line = {
        "step": num_steps,
        "epoch": num_steps / tasks.schedule.steps_per_epoch,
    }
    line |= reward_metrics(tasks.rewards.names, step.values_PGF, step.rewards_PG)
    values_compared_in_group = values_to_compare(
        step.values_PGF,
        tasks.rewards.weights,
        run.config.algorithm.multi_objective_aggregation,
    )
    is_equal_P = has_equal_rewards(values_compared_in_group)
    line["frac_reward_zero_std"] = is_equal_P.float().mean().item()
    # A user's loop may add a metric of the same name, which does not replace these numbers.
    return line | reduced | line


def reward_metrics(
    names: Sequence[str],
    values_PGF: Tensor,
    rewards_PG: Tensor,
) -> dict[str, float]:
    """Return statistics of the rewards of all ranks.

    Args:
        values_PGF: values of the reward functions, NaN where a function gave no value.
        rewards_PG: weighted sums of the values, NaN where no function gave a value.
    """
    metrics = {
        "reward": _mean(rewards_PG),
        "reward_std": _std(rewards_PG),
        "frac_unscorable": rewards_PG.isnan().float().mean().item(),
    }
    for f, name in enumerate(names):
        values_PG = values_PGF[..., f]
        metrics[f"rewards/{name}/mean"] = _mean(values_PG)
        metrics[f"rewards/{name}/std"] = _std(values_PG)
    return metrics


def add_completions(groups: Sequence[Group], metrics: Accumulator) -> None:
    """Add lengths, truncation and token counts of this rank's groups to the metrics."""
    lengths = []
    num_truncated = 0
    num_tokens = 0
    for group in groups:
        prompt_length = len(group.problem.prompt_ids)
        for completion in group.completions:
            # Lengths count the tokens that the model sampled. num_tokens also counts prompts and
            # the tokens that tools wrote, which the model reads.
            lengths.append(len(completion.sampled_ids))
            num_tokens += prompt_length + len(completion.ids)
            num_truncated += not completion.finished
    count = len(lengths)
    total = sum(lengths)
    metrics.add("completions/mean_length", total, count)
    metrics.add("completions/clipped_ratio", num_truncated, count)
    metrics.maximum("completions/max_length", max(lengths))
    # Negated, since ranks exchange maxima.
    metrics.maximum("completions/min_length", -min(lengths))
    metrics.total("completion_tokens", total)
    metrics.total("num_tokens", num_tokens)


def report_completions(run: Run, step: Step) -> None:
    """Write ``log_completions`` completions of the main rank to a file, if the step is due for it.

    The new weights score the completions. A problem has two records, or more if the step has too
    few problems.
    """
    world = run.world
    learner = run.learner
    reporter = run.log.reporter
    number = run.progress.step
    num_completions = run.config.logging.log_completions
    # Under FSDP all ranks score: a forward pass is a collective.
    scores_here = world.is_main or learner.is_sharded
    if not (num_completions and reporter.is_due(number) and scores_here):
        return

    P = len(step.groups)
    G = len(step.batch) // P
    # Two completions of a problem can be compared with each other.
    num_per_problem = max(2, math.ceil(num_completions / P))
    pairs = list(product(range(P), range(min(num_per_problem, G))))[:num_completions]
    indices = [p * G + g for p, g in pairs]

    # A row that the update skipped is scored too. Its old log-probs are those of the sampler.
    batch = replace(step.batch, old_logprobs_BT=step.reported_old_BT, is_computed_B=None)
    rows = batch.select(torch.tensor(indices))
    updated_BT = batch_logprobs(learner, learner.bare_scorer, rows)
    records = sample_records(
        step.groups,
        world.local_rows(step.values_PGF),
        world.local_rows(step.rewards_PG),
        step.batch.advantages_B.view(P, G).cpu(),
        names=run.tasks.rewards.names,
        rows=pairs,
        step=number,
        logprobs_BT=rows.old_logprobs_BT,
        updated_logprobs_BT=updated_BT,
        ref_logprobs_BT=rows.ref_logprobs_BT,
        decode=learner.policy.tokenizer.decode,
    )
    reporter.completions(number, records)


def _mean(values: Tensor) -> float:
    """Mean of the values that are not NaN; NaN if all values are NaN."""
    # In float64: rewards may be so large that their sum overflows fp32.
    return values.double().nanmean().item()


def _std(values: Tensor) -> float:
    """Standard deviation (n - 1) of the values that are not NaN; 0 for a single value, NaN for no
    value."""
    scored = values[~values.isnan()].double()
    return scored.std(correction=min(1, len(scored) - 1)).item()

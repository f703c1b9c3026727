"""GRPO on one page: sample completions, reward them, compute advantages and log-probs, update.

    python train_grpo.py --config configs/tiny_arithmetic.yaml             one process
    torchrun --nproc_per_node=8 train_grpo.py --config FILE.yaml           eight GPUs

Shapes: P problems of this rank (of all ranks if the name begins with all_), G completions of each
problem, F reward functions, B = P*G rows (completions), T completion tokens.

Two differences from the DeepSeekMath paper: a completion that no reward could score gets advantage
0; the loss is one mean over the optimizer step, over all ranks and micro-batches together.

Where to change what, in grpo/ (without an edit: algorithm.objective, advantages and loop):
    ratio, clip, KL   policy_loss and the functions that it calls, in algorithm/loss.py
    advantage         group_advantages and has_no_advantage, in algorithm/advantages.py
    a key's choices   the Literal of their names in algorithm/choices.py, besides the code
    metric            the statistics of policy_loss, or run/metrics.py
    engine            Engine in rollout/interface.py; run/prepare.py builds the engine
"""

import sys
from dataclasses import replace
from pathlib import Path

import grpo  # noqa: F401  # isort: skip  # before torch, for which it sets environment variables

from torch import Tensor

from grpo.algorithm.advantages import group_advantages, normalize_then_sum, weighted_sum
from grpo.algorithm.batch import Batch, collate, minibatches, skip_zero_advantage
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.config import load_config
from grpo.distributed import OtherRankFailed, gradient_sync, start_world
from grpo.run import debug
from grpo.run.ending import run_to_completion
from grpo.run.metrics import record_microbatch
from grpo.run.optimizer import apply_update, sync_reference_if_due
from grpo.run.passes import batch_logprobs, rank_microbatches, top_entropy_mask
from grpo.run.prepare import prepare
from grpo.run.records import Learner, Rollout, Run, Step
from grpo.run.rollouts import replace_equal_groups, sample_and_score
from grpo.run.steps import remaining_steps
from grpo.run.user_functions import own_advantages
from grpo.system import ignore_broken_pipes
from grpo.telemetry.terminal import exit_with_user_error

DEMO = Path(__file__).parent / "configs" / "tiny_arithmetic.yaml"


def train(run: Run) -> None:
    """Run all remaining steps. Between steps, the iterator evaluates, logs, saves and may stop."""
    algorithm = run.config.algorithm
    learner = run.learner
    world = run.world
    for step in remaining_steps(run):
        problems = run.tasks.schedule.problems_of_step(step.number)  # those of this rank
        with run.sampler.current_weights(step.seconds):
            rollout = sample_and_score(run, step, problems)
            if algorithm.dynamic_sampling:
                rollout = replace_equal_groups(run, step, rollout)

        # A group is on one rank. Rewards are gathered for scale="batch", GDPO and the metrics.
        all_values_PGF = world.gather_rows(rollout.values_PGF)
        all_rewards_PG = weighted_sum(all_values_PGF, run.tasks.rewards.weights)
        all_advantages_PG = compute_advantages(run, step, rollout, all_values_PGF, all_rewards_PG)
        advantages_PG = world.local_rows(all_advantages_PG)
        batch = collate(
            rollout.groups,
            advantages_PG,
            pad_id=learner.policy.pad_id,
            device=world.device,
            mask_truncated=algorithm.mask_truncated_completions,
        )
        if algorithm.skips_zero_advantage:  # such rows get no pass; the denominator counts them
            batch = skip_zero_advantage(batch, algorithm.num_minibatches)

        with world.timed("logprobs", step.seconds):
            batch = with_old_and_ref_logprobs(learner, batch)
        step.keep_for_metrics(rollout.groups, all_values_PGF, all_rewards_PG, batch)
        if run.config.debug:
            debug.show_step(run, step)
        with world.timed("update", step.seconds):
            for iteration in range(algorithm.num_iterations):
                for minibatch in minibatches(batch, algorithm.num_minibatches):
                    update(learner, step, minibatch, is_first_iteration=iteration == 0)
        sync_reference_if_due(learner, num_steps=step.number + 1)


def compute_advantages(
    run: Run, step: Step, rollout: Rollout, all_values_PGF: Tensor, all_rewards_PG: Tensor
) -> Tensor:
    """Advantages ``[P, G]`` of all ranks. A reward is NaN if the completion has no score."""
    algorithm = run.config.algorithm
    if run.learner.user_advantages is not None:
        return own_advantages(run, step, rollout.groups, all_rewards_PG, all_values_PGF)
    if algorithm.multi_objective_aggregation == "normalize_then_sum":  # GDPO
        weights = run.tasks.rewards.weights
        return normalize_then_sum(all_values_PGF, weights, eps=algorithm.advantage_eps)
    # GRPO, baseline "mean" and scale "group": the reward minus the mean of its group, over the
    # standard deviation of its group plus eps.
    return group_advantages(
        all_rewards_PG,
        baseline=algorithm.baseline,
        scale=algorithm.scale,
        eps=algorithm.advantage_eps,
    )


def with_old_and_ref_logprobs(learner: Learner, batch: Batch) -> Batch:
    """Add inputs of the loss that have no gradient: old and reference log-probs, policy mask."""
    algorithm = learner.config.algorithm
    # With a single update per rollout, the old log-probs are the new ones, detached: see update.
    if algorithm.objective == "dppo_tv":  # its old log-probs are those recorded while sampling
        batch = replace(batch, old_logprobs_BT=batch.sampling_logprobs_BT)
    elif algorithm.updates_per_step > 1:
        old_BT = batch_logprobs(learner, learner.bare_scorer, batch)
        batch = replace(batch, old_logprobs_BT=old_BT)
    if learner.ref_scorer is not None:
        ref_BT = batch_logprobs(learner, learner.ref_scorer, batch)
        batch = replace(batch, ref_logprobs_BT=ref_BT)
    if algorithm.top_entropy_quantile < 1:
        batch = replace(batch, policy_mask_BT=top_entropy_mask(learner, batch))
    return batch


def update(learner: Learner, step: Step, minibatch: Batch, *, is_first_iteration: bool) -> None:
    """Make one optimizer update. ``minibatch`` holds this rank's rows."""
    algorithm = learner.config.algorithm
    world = learner.world

    # Counted over all ranks before the first backward. An average per rank or per micro-batch would
    # give the tokens of a rank with fewer of them more weight, and the gradient would depend on how
    # the batch is cut.
    rank_denominator = loss_denominator(
        minibatch.loss_mask_BT,
        aggregation=algorithm.aggregation,
        max_length=learner.max_length,
    )
    denominator = world.sum(rank_denominator).clamp(min=1)  # it is 0 if all are masked

    for micro, is_last in rank_microbatches(learner, minibatch):
        with gradient_sync(learner.scorer, enabled=is_last):
            # Shifted cross-entropy of the completion's tokens: grpo/algorithm/logprobs.py.
            with learner.policy.autocast():
                # entropy_BT has no gradient: it is for the metrics.
                new_BT, entropy_BT = learner.scorer(*micro.scorer_inputs)
            old_BT = new_BT.detach() if micro.old_logprobs_BT is None else micro.old_logprobs_BT
            # GRPO: ratio = exp(new - old) (importance_ratio); the loss of a token is
            # -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) (surrogate_loss)
            # + beta * KL(new, ref) (kl_estimate). Then the mean over the completion's tokens.
            loss_sum, stats = policy_loss(
                new_BT,
                old_BT,
                micro.advantages_B,
                micro.loss_mask_BT,
                ref_logprobs_BT=micro.ref_logprobs_BT,
                objective=learner.objective,  # a name, or a function of the user
                importance_level=algorithm.importance_level,
                epsilon=algorithm.epsilon,
                epsilon_high=algorithm.epsilon_high,
                delta=algorithm.delta,
                beta=algorithm.beta,
                kl_estimator=algorithm.kl_estimator,
                unbiased_kl=algorithm.unbiased_kl,
                aggregation=algorithm.aggregation,
                max_length=learner.max_length,
                policy_mask_BT=micro.policy_mask_BT,
                sampling_logprobs_BT=micro.sampling_logprobs_BT,
                sampler_correction=algorithm.sampler_correction,
                sampler_correction_min=algorithm.sampler_correction_min,
                sampler_correction_max=algorithm.sampler_correction_max,
                off_policy_mask_threshold=algorithm.off_policy_mask_threshold,
                step=step.number,
            )
            # DDP and FSDP divide the sum of the ranks' gradients by world.size.
            (loss_sum * world.size / denominator).backward()
        step.metrics.add_all(stats)
        step.metrics.add("loss", loss_sum.detach(), count=0)  # the denominator counts once, below
        record_microbatch(step, algorithm, micro, new_BT, old_BT, entropy_BT, is_first_iteration)
    step.metrics.add("loss", 0, count=rank_denominator)
    if learner.config.debug:
        debug.check_update(learner, step.metrics)
    apply_update(learner, step.metrics)  # clips the gradient; all skip one that is not finite


def main(argv: list[str]) -> int:
    world = run = None
    ignore_broken_pipes()
    try:
        config = load_config(argv, default_file=DEMO)
        world = start_world(config.runtime)
        run = prepare(config, world)  # None: already complete
    except (ValueError, OSError, OtherRankFailed, KeyboardInterrupt) as error:
        return exit_with_user_error(error, world)
    code = run_to_completion(run, train) if run is not None else 0
    world.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

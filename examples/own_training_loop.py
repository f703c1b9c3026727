r"""A training loop of your own: problems that the model solves sometimes are asked again.

    torchrun --nproc_per_node=2 train_grpo.py --config configs/tiny_arithmetic.yaml \
        algorithm.loop=examples/own_training_loop.py:train algorithm.own_args.loop.share=0.5 \
        output_dir=runs/own_loop

It is the loop of train_grpo.py with two parts more, marked 1 and 2, and without dynamic sampling
and the lines that --debug prints. A run that is killed continues with the same bits. `python -m
grpo.sweep` with `--vary algorithm.own_args.loop.share=0,0.25,0.5` compares shares.
"""

import torch

from grpo.algorithm.advantages import has_equal_rewards, weighted_sum
from grpo.algorithm.batch import collate, minibatches, skip_zero_advantage
from grpo.run.optimizer import sync_reference_if_due
from grpo.run.rollouts import sample_and_score
from grpo.run.steps import remaining_steps
from train_grpo import compute_advantages, update, with_old_and_ref_logprobs


def train(run, *, share=0.25):
    """Run all remaining steps. A `share` of the problems of each step has been asked before."""
    algorithm = run.config.algorithm
    learner = run.learner
    world = run.world
    if algorithm.dynamic_sampling:
        raise ValueError("this loop has no dynamic sampling")
    problem_of_index = {problem.index: problem for problem in run.tasks.schedule.problems}
    most_again = int(share * run.config.rollout.prompts_per_step)

    for step in remaining_steps(run):
        # 1. The oldest of the problems that wait take the places of scheduled ones. Every rank
        # makes the whole list, and asks its own part of it. No problem may be in a step twice: its
        # completions would be the same.
        waiting = run.progress.loop_state.get("waiting", [])
        scheduled = run.tasks.schedule.problems_of_step(step.number)  # those of this rank
        indices_of_rank = torch.tensor([problem.index for problem in scheduled])
        indices = world.gather_rows(indices_of_rank).tolist()
        again = [index for index in waiting if index not in indices][:most_again]
        indices = indices[len(again) :] + again
        problems = [problem_of_index[index] for index in world.local_rows(indices)]

        with run.sampler.current_weights(step.seconds):
            rollout = sample_and_score(run, step, problems)
        all_values_PGF = world.gather_rows(rollout.values_PGF)
        all_rewards_PG = weighted_sum(all_values_PGF, run.tasks.rewards.weights)
        all_advantages_PG = compute_advantages(run, step, rollout, all_values_PGF, all_rewards_PG)
        batch = collate(
            rollout.groups,
            world.local_rows(all_advantages_PG),
            pad_id=learner.policy.pad_id,
            device=world.device,
            mask_truncated=algorithm.mask_truncated_completions,
        )
        if algorithm.skips_zero_advantage:
            batch = skip_zero_advantage(batch, algorithm.num_minibatches)
        with world.timed("logprobs", step.seconds):
            batch = with_old_and_ref_logprobs(learner, batch)
        step.keep_for_metrics(rollout.groups, all_values_PGF, all_rewards_PG, batch)
        with world.timed("update", step.seconds):
            for iteration in range(algorithm.num_iterations):
                for minibatch in minibatches(batch, algorithm.num_minibatches):
                    update(learner, step, minibatch, is_first_iteration=iteration == 0)
        sync_reference_if_due(learner, num_steps=step.number + 1)

        # 2. Which problems wait is saved with the checkpoint. It changes after the updates, so that
        # a step that fails leaves the list as it was, and it is the same on all ranks. A problem
        # whose completions have different rewards waits, at the end of the list.
        differs = ~has_equal_rewards(all_rewards_PG)
        still_waiting = [index for index in waiting if index not in again]
        solved_sometimes = [index for index, is_so in zip(indices, differs, strict=True) if is_so]
        new = [index for index in solved_sometimes if index not in still_waiting]
        run.progress.loop_state["waiting"] = still_waiting + new
        step.metrics.add("own/asked_again", len(again))

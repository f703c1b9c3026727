"""GRPO on one page: sample completions, compute rewards, advantages, old and reference log-probs, update.

    python train_grpo.py --config configs/tiny_arithmetic.yaml             one process
    torchrun --nproc_per_node=8 train_grpo.py --config FILE.yaml           eight GPUs

P problems a step (over all ranks), G completions each, B = P*G rows, T completion tokens. Departures from the
DeepSeekMath paper: the loss is averaged over the whole optimizer step on all ranks at once, whatever the micro-batches;
completions that no reward could score get advantage 0; with one update per rollout the old log-probs are the new ones,
detached.
"""

import sys
from dataclasses import replace
from pathlib import Path

import grpo  # noqa: F401  # isort: skip  # before torch, for which it sets environment variables

import torch
from torch import Tensor

from grpo.algorithm.advantages import has_no_advantage
from grpo.algorithm.batch import Batch, Group, collate, minibatches, skip_zero_advantage
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.config import load_config
from grpo.distributed import Interrupted, OtherRankFailed, gradient_sync, start_world
from grpo.rollout import engine_with_weights
from grpo.run import debug
from grpo.run.balance import balance
from grpo.run.ending import print_result, run_to_completion
from grpo.run.metrics import add_microbatch
from grpo.run.optimizer import apply_update
from grpo.run.passes import batch_logprobs, top_entropy_mask, update_microbatches
from grpo.run.prepare import prepare
from grpo.run.state import Run
from grpo.run.step import Step, count_reward_failures, run_step, score
from grpo.telemetry.console import evaluation_table
from grpo.telemetry.terminal import exit_with_user_error, survive_lost_readers

DEMO = Path(__file__).parent / "configs" / "tiny_arithmetic.yaml"
"""The configuration without ``--config``."""


def train(run: Run) -> None:
    """Run all remaining steps: sample, compute rewards, advantages and log-probs, update; then evaluate and save.

    Raises:
        Interrupted: on all ranks, at the end of a rollout or a step, after a signal that asks to stop.
        ValueError: on all ranks, if a reward fails on every completion of a step or gradients stay non-finite.
    """
    config, world, algorithm, progress = run.config, run.world, run.config.algorithm, run.progress
    if progress.step == 0 and config.eval.before_training:
        progress.before = run.evaluate(0, seconds={})
        run.reporter.step({"step": 0, **progress.before})
    if progress.unwritten_line:  # the run was stopped in the evaluation of its last complete step
        end_step(run, progress.unwritten_line)
    options = dict(device=world.device, mask_truncated=algorithm.mask_truncated_completions)
    for number in range(progress.step, run.max_steps):
        with run_step(run, number) as step:  # measures the block and, at its end, reduces and reports its metrics
            groups, values_PGF = balance(run, *sample_and_score(run, step))  # whole groups move between ranks
            scores = run.scores(world.gather_rows(values_PGF))  # of all ranks; the other tensors are this rank's
            advantages_PG = world.own_rows(scores.advantages(**algorithm.advantage_options))
            batch = collate(groups, advantages_PG, pad_id=run.policy.pad_id, **options)
            if algorithm.skips_zero_advantage:
                batch = skip_zero_advantage(batch, algorithm.num_minibatches)
            with world.timed("logprobs", step.seconds):
                batch = with_old_and_ref_logprobs(run, batch)
            step.begin_update(groups, scores, batch)
            if config.debug:
                debug.show_step(run, step)
            with world.timed("update", step.seconds):
                for iteration in range(algorithm.num_iterations):
                    for minibatch in run.reporter.progress("update", minibatches(batch, algorithm.num_minibatches)):
                        update(run, step, minibatch, is_first_pass=iteration == 0)
            if run.ref_scorer and algorithm.ref_sync_steps and (number + 1) % algorithm.ref_sync_steps == 0:
                run.sync_reference()
        end_step(run, step.line)
    if config.debug:
        debug.show_verdict(run)
    else:
        print_result(run)


def sample_and_score(run: Run, step: Step) -> tuple[list[Group], Tensor]:
    """This rank's groups, and the value of each reward function for each completion, ``[P, G, F]`` (NaN: not scored).

    With dynamic sampling (DAPO, section 3.2) a group whose advantages are all 0 is replaced by a group of another
    problem. The substitute is a function of (step, position in the batch, attempt), so that neither the world size nor
    a resume changes it; after the last attempt the group stays as it is.
    """
    world, algorithm, sampling, seconds = run.world, run.config.algorithm, run.sampling, step.seconds
    problems = run.problems.at(step.number)
    groups: list[Group | None] = [None] * len(problems)
    values_PGF = torch.full((len(problems), sampling.num_generations, len(run.rewards.names)), torch.nan)
    most_tokens = sampling.num_generations * sampling.max_completion_length  # of one problem
    seed_key = (run.config.seed, "rollout", step.number)
    missing = list(range(len(problems)))  # positions in the batch that need a group
    with engine_with_weights(run.engine, world, seconds):
        for attempt in range(1 + algorithm.dynamic_sampling * algorithm.dynamic_sampling_attempts):
            values, result = values_PGF[missing], None
            # An out-of-memory error, a failing reward or a signal may occur on this rank only.
            with world.fail_together(), world.interruptible():
                with world.timed("rollout", seconds), run.reporter.bar("rollout", len(missing) * most_tokens) as bar:
                    chosen = [problems[p] for p in missing]
                    sampled = run.engine.generate(chosen, sampling, seed_key=seed_key, on_tokens=bar.update)
                with world.timed("reward", seconds):
                    if sampled:
                        values, result = score(run, sampled)
            count_reward_failures(run, step, result, is_whole_step=attempt == 0)
            for p, group, value_GF in zip(missing, sampled, values, strict=True):
                groups[p], values_PGF[p] = group, value_GF
            if not algorithm.dynamic_sampling or attempt == algorithm.dynamic_sampling_attempts:
                break
            compared = run.scores(values_PGF).compared
            replaced_P = has_no_advantage(compared, baseline=algorithm.baseline, scale=algorithm.scale)
            positions = replaced_P.nonzero().flatten().tolist()
            substitutes = {p: run.problems.substitute(step.number, p, attempt) for p in positions}
            missing = [p for p, problem in substitutes.items() if problem is not None]
            for p in missing:
                problems[p] = substitutes[p]
            if world.all_true(not missing):
                break
    return groups, values_PGF


def with_old_and_ref_logprobs(run: Run, batch: Batch) -> Batch:
    """Add the log-probs of the policy that sampled and of the reference, by shifted cross-entropy without gradient."""
    algorithm, old_BT, ref_BT, policy_mask_BT = run.config.algorithm, None, None, None
    if algorithm.objective == "dppo_tv":  # bounds the distance to the sampler itself
        old_BT = batch.sampling_logprobs_BT
    elif algorithm.updates_per_step > 1:  # else old = new.detach() has the same values and saves a forward pass
        old_BT = batch_logprobs(run, run.bare_scorer, batch)
    if run.ref_scorer is not None:
        ref_BT = batch_logprobs(run, run.ref_scorer, batch)
    if algorithm.top_entropy_quantile < 1:
        policy_mask_BT = top_entropy_mask(run, batch)
    return replace(batch, old_logprobs_BT=old_BT, ref_logprobs_BT=ref_BT, policy_mask_BT=policy_mask_BT)


def update(run: Run, step: Step, minibatch: Batch, *, is_first_pass: bool) -> None:
    """One optimizer update from this rank's share of a minibatch."""
    config, world, metrics = run.config, run.world, step.metrics
    # Counted over all ranks before the first backward. An average per rank or per micro-batch would give the tokens of
    # a rank with fewer of them more weight, and the gradient would depend on how the batch is cut.
    own_denominator = loss_denominator(minibatch.loss_mask_BT, **run.averaging)
    denominator = world.sum(own_denominator).clamp(min=1)
    for micro, is_last in update_microbatches(run, minibatch):
        with gradient_sync(run.scorer, enabled=is_last or config.optim.reduce_each_microbatch):
            with run.policy.autocast():
                new_BT, entropy_BT = run.scorer(*micro.scorer_inputs)
            old_BT = new_BT.detach() if micro.old_logprobs_BT is None else micro.old_logprobs_BT
            inputs = new_BT, old_BT, micro.advantages_B, micro.loss_mask_BT
            loss_sum, stats = policy_loss(*inputs, **micro.loss_inputs, **run.loss_options)
            (loss_sum * world.size / denominator).backward()  # DDP and FSDP divide by world.size
        metrics.add_all(stats)
        metrics.add("loss", loss_sum.detach(), own_denominator * is_last)  # the denominator counts once
        add_microbatch(run, step, micro, new_BT, old_BT, entropy_BT, is_first_pass=is_first_pass)
    if config.debug:
        debug.check_update(run, metrics)
    apply_update(run, metrics)


def end_step(run: Run, line: dict) -> None:
    """Evaluate and save where it is due, write the step's line; Interrupted if a signal to any rank asks to stop."""
    step, every = run.progress.step, run.config.eval.every
    is_last, seconds, evaluated = step == run.max_steps, {}, {}
    if is_last or (every and step % every == 0):
        evaluated = run.evaluate(step, seconds)
        line = line | {"time/eval": seconds.get("eval", 0.0)} | evaluated
    run.reporter.step(line)
    run.progress.unwritten_line = None
    run.saver.save_if_due(line)
    if is_last and evaluated:
        run.reporter.print(evaluation_table(run.progress.before, evaluated))
    save, stop = run.signals.vote()
    if save and run.saver.saved_step < step:
        run.saver.save()
    if stop and not is_last:
        raise Interrupted


def main(argv: list[str]) -> int:
    world = run = None
    survive_lost_readers()
    try:
        config = load_config(argv, default_file=DEMO)
        world = start_world(config.runtime)
        run = prepare(config, world)
    except (ValueError, OSError, OtherRankFailed, KeyboardInterrupt) as error:  # user errors, or Ctrl-C
        return exit_with_user_error(error, world)
    code = run_to_completion(run, train) if run is not None else 0
    world.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

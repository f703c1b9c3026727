"""GRPO on one page: sample completions, compute rewards, advantages, old and reference log-probs, update.

    python train_grpo.py --config configs/tiny_arithmetic.yaml             one process
    torchrun --nproc_per_node=8 train_grpo.py --config FILE.yaml           eight GPUs

P problems a step (over all ranks), G completions each, B = P*G rows, T completion tokens. Departures from the DeepSeekMath paper: the
loss is averaged over the whole optimizer step on all ranks at once, whatever the micro-batches; completions that no reward could score
get advantage 0; with one update per rollout the old log-probs are the new ones, detached.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import grpo  # noqa: F401  # isort: skip  # before torch, for which it sets environment variables

import torch
from torch import Tensor

from grpo.algorithm.advantages import has_no_advantage
from grpo.algorithm.batch import Batch, Group, collate, minibatches, skip_zero_advantage
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.algorithm.seeding import derive_seed
from grpo.config import load_config
from grpo.distributed import Interrupted, OtherRankFailed, gradient_sync, start_world
from grpo.run import debug
from grpo.run.ending import print_result, run_to_completion
from grpo.run.optimizer import apply_update
from grpo.run.prepare import prepare
from grpo.run.state import Run
from grpo.run.step_metrics import add_microbatch, count_reward_failures, report_details, step_line
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.console import evaluation_table
from grpo.telemetry.terminal import survive_lost_readers
from grpo.telemetry.user_errors import exit_with_user_error

DEMO = Path(__file__).parent / "configs" / "tiny_arithmetic.yaml"
"""The configuration without ``--config``."""
PHASES = ("rollout", "reward", "logprobs", "update", "eval")


def train(run: Run) -> None:
    """Run all remaining steps: sample, compute rewards, advantages and log-probs, update; then report, evaluate, save.

    Raises:
        Interrupted: on all ranks, at the end of a step, after a signal that asks to stop.
        ValueError: on all ranks, if a reward fails on every completion of a step or gradients stay non-finite.
    """
    config, world, algorithm, progress = run.config, run.world, run.config.algorithm, run.progress
    if progress.step == 0 and config.eval.before_training:
        with world.timed("eval", {}):
            progress.before = run.evaluate(step=0)
        run.reporter.step({"step": 0, **progress.before})
    if progress.unwritten_line:  # the run was stopped in the evaluation of its last complete step
        end_step(run, progress.unwritten_line)
    for step in range(progress.step, run.max_steps):
        metrics, seconds = Accumulator(), dict.fromkeys(PHASES, 0.0)
        started = time.perf_counter()
        if not config.model.disable_dropout:  # the only part of a step that draws from PyTorch's global generators
            torch.manual_seed(derive_seed(config.seed, "dropout", step, world.rank))

        with run.sampling_weights(seconds):
            groups, values_PGF = sample_and_score(run, step, seconds, metrics)
        all_scores = run.scores(world.gather_rows(values_PGF))  # of all ranks; the other tensors are this rank's
        advantages_PG = world.own_rows(all_scores.advantages(**algorithm.advantage_options))
        options = dict(device=world.device, mask_truncated=algorithm.mask_truncated_completions)
        batch = collate(groups, advantages_PG, pad_id=run.policy.pad_id, **options)
        if algorithm.skips_rows:
            batch = skip_zero_advantage(batch, algorithm.num_minibatches)
        with world.timed("logprobs", seconds):
            batch = with_old_and_ref_logprobs(run, batch)
        if config.debug:
            debug.show_step(run, step, groups, values_PGF, advantages_PG, batch, seconds)
        # The old log-probs that the loss uses; the first pass over the batch writes them. Rows that it skips keep the sampler's.
        old_BT = batch.sampling_logprobs_BT.clone()
        with world.timed("update", seconds):
            for iteration in range(algorithm.num_iterations):
                for minibatch in run.reporter.progress("update", minibatches(batch, algorithm.num_minibatches)):
                    update(run, minibatch, metrics, first_pass_BT=old_BT if iteration == 0 else None)
        if run.ref_scorer and algorithm.ref_sync_steps and (step + 1) % algorithm.ref_sync_steps == 0:
            run.sync_reference()

        metrics.maximum("step_time", time.perf_counter() - started)
        line = step_line(run, groups, all_scores, metrics, seconds)
        progress.complete_step(line)
        scored = replace(batch, old_logprobs_BT=old_BT)
        report_details(run, groups, scored, all_scores, metrics)
        end_step(run, line)
    if config.debug:
        debug.show_verdict(run)
    else:
        print_result(run)


def sample_and_score(run: Run, step: int, seconds: dict, metrics: Accumulator) -> tuple[list[Group], Tensor]:
    """This rank's groups, and the value of each reward function for each completion, ``[P, G, F]`` (NaN: it could not score it).

    With dynamic sampling (DAPO, section 3.2) a group whose advantages are all 0 is replaced by a group of another problem. The
    substitute is a function of (step, position in the batch, attempt), so that neither the world size nor a resume changes it; after
    the last attempt the group is kept as it is.
    """
    world, algorithm = run.world, run.config.algorithm
    problems = run.problems.at(step)
    groups: list[Group | None] = [None] * len(problems)
    values_PGF = torch.full((len(problems), run.sampling.num_generations, len(run.rewards.names)), torch.nan)
    most_tokens = run.sampling.num_generations * run.sampling.max_completion_length  # of one problem
    seed_key = (run.config.seed, "rollout", step)  # what the random numbers of sampling depend on
    missing = list(range(len(problems)))  # positions in the batch that need a group
    for attempt in range(1 + algorithm.dynamic_sampling * algorithm.dynamic_sampling_attempts):
        values, result = values_PGF[missing], None
        # An out-of-memory error, a failing reward or a signal may occur on this rank only.
        with world.fail_together(), world.interruptible():
            with world.timed("rollout", seconds), run.reporter.bar("rollout", len(missing) * most_tokens) as bar:
                chosen = [problems[p] for p in missing]
                sampled = run.engine.generate(chosen, run.sampling, seed_key=seed_key, on_tokens=bar.update)
            with world.timed("reward", seconds):
                if sampled:
                    values, result = run.score(sampled)
        count_reward_failures(run, result, metrics, is_whole_step=attempt == 0)
        for p, group, value_GF in zip(missing, sampled, values, strict=True):
            groups[p], values_PGF[p] = group, value_GF
        if not algorithm.dynamic_sampling or attempt == algorithm.dynamic_sampling_attempts:
            break
        compared = run.scores(values_PGF).compared
        replaced_P = has_no_advantage(compared, baseline=algorithm.baseline, scale=algorithm.scale)
        substitutes = {p: run.problems.substitute(step, p, attempt) for p in replaced_P.nonzero().flatten().tolist()}
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
        old_BT = run.logprobs(run.bare_scorer, batch)
    if run.ref_scorer is not None:
        ref_BT = run.logprobs(run.ref_scorer, batch)
    if algorithm.top_entropy_quantile < 1:
        policy_mask_BT = run.top_entropy_mask(batch)
    return replace(batch, old_logprobs_BT=old_BT, ref_logprobs_BT=ref_BT, policy_mask_BT=policy_mask_BT)


def update(run: Run, minibatch: Batch, metrics: Accumulator, *, first_pass_BT: Tensor | None) -> None:
    """One optimizer update from this rank's share of a minibatch.

    In the first pass over the batch, the old log-probs of the minibatch's rows are written into ``first_pass_BT``.
    """
    config, world, algorithm = run.config, run.world, run.config.algorithm
    averaging = dict(aggregation=algorithm.aggregation, max_length=config.rollout.max_completion_length)
    options = algorithm.loss_options | averaging
    # Counted over all ranks before the first backward. An average per rank or per micro-batch would give the tokens of a rank with
    # fewer of them more weight, and the gradient would depend on how the batch is divided.
    own_denominator = loss_denominator(minibatch.loss_mask_BT, **averaging)
    denominator = world.sum(own_denominator).clamp(min=1)
    for micro, is_last in run.microbatches(minibatch):
        with gradient_sync(run.scorer, enabled=is_last or config.optim.reduce_each_microbatch):
            with run.policy.autocast():
                new_BT, entropy_BT = run.scorer(*micro.scorer_inputs)
            old_BT = new_BT.detach() if micro.old_logprobs_BT is None else micro.old_logprobs_BT
            inputs = new_BT, old_BT, micro.advantages_B, micro.loss_mask_BT
            loss_sum, stats = policy_loss(*inputs, **micro.loss_inputs, **options)
            (loss_sum * world.size / denominator).backward()  # DDP and FSDP divide by world.size
        metrics.add_all(stats)
        metrics.add("loss", loss_sum.detach(), own_denominator * is_last)  # the denominator counts once
        add_microbatch(run, metrics, micro, new_BT, old_BT, entropy_BT, first_pass=first_pass_BT is not None)
        if first_pass_BT is not None:
            first_pass_BT[micro.row_B, : old_BT.shape[1]] = old_BT
    if config.debug:
        debug.check_update(run, metrics)
    apply_update(run, metrics)


def end_step(run: Run, line: dict) -> None:
    """Evaluate and save where it is due, write the step's line; raise Interrupted if a signal asked to stop (all ranks vote)."""
    step, every = run.progress.step, run.config.eval.every
    is_last, seconds, evaluated = step == run.max_steps, {}, {}
    if is_last or (every and step % every == 0):
        with run.world.timed("eval", seconds):
            evaluated = run.evaluate(step)
        line = line | {"time/eval": seconds["eval"]} | evaluated
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
    except (ValueError, OSError, OtherRankFailed) as error:  # user errors: settings, files, data
        return exit_with_user_error(error, world)
    if run is not None:
        return run_to_completion(run, train)
    world.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

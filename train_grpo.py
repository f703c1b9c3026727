"""GRPO on one page: sample, score, centre, compute old and reference log-probs, update.

    python train_grpo.py --config configs/tiny_arithmetic.yaml             one process
    torchrun --nproc_per_node=8 train_grpo.py --config FILE.yaml           eight GPUs

P problems a step (over all ranks), G completions each, B = P*G rows, T completion tokens. Where this departs from the
DeepSeekMath paper: the loss is averaged over the whole optimizer step on all ranks at once, whatever the micro-batches; completions
that nothing could score get advantage 0; one update per rollout needs no separate old policy.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from grpo.advantages import group_advantages, has_equal_rewards
from grpo.batch import Batch, Group, collate, microbatches, minibatches
from grpo.config import Config, load_config
from grpo.distributed import WORLD_KEYS, Interrupted, RanksDisagree, World, start_world
from grpo.loss import loss_denominator, policy_loss
from grpo.model import sync_reference
from grpo.rollout import generate
from grpo.run import debug
from grpo.run.ending import run_to_completion
from grpo.run.optimizer import apply_update
from grpo.run.prepare import prepare
from grpo.run.state import Run, check_rewards
from grpo.run.step_metrics import first_pass_metrics, log_completions, step_line
from grpo.seeding import derive_seed
from grpo.telemetry.console import evaluation_table
from grpo.telemetry.metrics import Accumulator
from grpo.telemetry.profile import finish_profiler, start_profiler
from grpo.telemetry.user_errors import refuse

DEMO = Path(__file__).parent / "configs" / "tiny_arithmetic.yaml"
"""The configuration without ``--config``."""
PHASES = ("rollout", "reward", "logprobs", "update", "eval")


def train(run: Run) -> None:
    """Every step from where the run stands to its last: sample, score, centre, score the tokens, update; report, evaluate, save.

    Raises:
        Interrupted: on all ranks, at the end of a step, after a signal that asks to stop.
        ValueError: on all ranks, if a reward fails on every completion of a step or gradients stay non-finite.
    """
    config, world, algorithm = run.config, run.world, run.config.algorithm
    if run.start == 0 and config.eval.before_training:
        run.before = run.evaluate(step=0)
        run.reporter.step({"step": 0, **run.before})
    if run.saver.unreported:  # stopped while that step was evaluated
        end_step(run, run.start, run.saver.unreported)
    for step in range(run.start, run.max_steps):
        metrics, seconds = Accumulator(), dict.fromkeys(PHASES, 0.0)
        profiler = start_profiler(config, world, step + 1)
        started = time.perf_counter()
        if not config.model.disable_dropout:  # the only thing in a step that draws from the global generators
            torch.manual_seed(derive_seed(config.seed, "dropout", step, world.rank))

        groups, values_PGF, rewards_PG = sample_and_score(run, step, seconds, metrics)
        all_rewards_PG = world.gather_rows(rewards_PG)
        all_advantages_PG = group_advantages(all_rewards_PG, baseline=algorithm.baseline, scale=algorithm.scale)
        advantages_PG = world.own_rows(all_advantages_PG)
        batch = collate(
            groups,
            advantages_PG,
            pad_id=run.policy.pad_id,
            device=world.device,
            mask_truncated=algorithm.mask_truncated_completions,
        )
        with world.timed("logprobs", seconds):
            batch = with_old_and_ref_logprobs(run, batch)
        if config.debug:
            debug.show_step(run, step, groups, values_PGF, advantages_PG, batch, seconds)
        with world.timed("update", seconds):
            for iteration in range(algorithm.num_iterations):
                for minibatch in run.reporter.through("update", minibatches(batch, algorithm.num_minibatches)):
                    update(run, minibatch, metrics, is_first_pass=iteration == 0)
        if run.ref_scorer and algorithm.ref_sync_steps and (step + 1) % algorithm.ref_sync_steps == 0:
            sync_reference(run.ref_scorer.model, run.policy.model, algorithm.ref_sync_alpha)

        step_time = time.perf_counter() - started
        finish_profiler(profiler, run, step + 1)
        all_values_PGF = world.gather_rows(values_PGF)
        line = step_line(run, step + 1, groups, all_values_PGF, all_rewards_PG, metrics, seconds, step_time)
        run.saver.step_done(step + 1, line)
        log_completions(run, step + 1, groups, batch, values_PGF, all_rewards_PG, all_advantages_PG, metrics)
        end_step(run, step + 1, line)
    if not config.debug:
        run.reporter.say(f"saved     {config.output_dir}/checkpoint-{run.max_steps}, a Hugging Face folder")


def end_step(run: Run, step: int, line: dict) -> None:
    """Evaluate and save where it is time to, write the step's line; stop here if a signal asked for it (all ranks agree)."""
    is_last, every, seconds, evaluated = step == run.max_steps, run.config.eval.every, {}, {}
    if is_last or (every and step % every == 0):
        with run.world.timed("eval", seconds):
            evaluated = run.evaluate(step)
        line = line | {"time/eval": seconds["eval"]} | evaluated
    run.reporter.step(line)
    run.saver.unreported = None
    run.saver.after(step, line)
    if is_last and evaluated:
        run.reporter.say(evaluation_table(run.before, evaluated))
    save, stop = run.signals.agree()
    if save and run.saver.saved < step:
        run.saver.save(step)
    if stop and not is_last:
        raise Interrupted


def sample_and_score(
    run: Run, step: int, seconds: dict[str, float], metrics: Accumulator
) -> tuple[list[Group], torch.Tensor, torch.Tensor]:
    """This rank's groups, every reward ``[P, G, F]``, and their weighted sum ``[P, G]`` (NaN: nothing could score it).

    With dynamic sampling (DAPO, section 3.2) a place whose group has equal rewards goes to another problem. Which one is a
    function of (step, place, attempt), so that neither world size nor a resume changes it; a place that stays without
    signal keeps its group.
    """
    world, algorithm = run.world, run.config.algorithm
    problems = run.problems.at(step)
    groups: list[Group | None] = [None] * len(problems)
    values_PGF = torch.full((len(problems), run.sampling.num_generations, len(run.rewards.names)), torch.nan)
    places = list(range(len(problems)))
    for attempt in range(1 + algorithm.dynamic_sampling * algorithm.dynamic_sampling_attempts):
        values, result, error = values_PGF[places], None, None
        try:
            with world.local_work():
                with world.timed("rollout", seconds):
                    total = len(places) * run.sampling.num_generations * run.sampling.max_completion_length
                    with run.reporter.bar("rollout", total) as bar:
                        sampled = generate(
                            run.policy,
                            [problems[p] for p in places],
                            run.sampling,
                            address=(run.config.seed, "rollout", step),
                            on_tokens=bar.update,
                        )
                with world.timed("reward", seconds):
                    if sampled:
                        values, result = run.score(sampled)
        except (Exception, Interrupted) as failed:
            error = failed  # out of memory, a broken reward, a signal: on this rank only perhaps, so all vote on it
        check_rewards(run, result, error, metrics, is_whole_step=attempt == 0)
        for p, group, value_GF in zip(places, sampled, values, strict=True):
            groups[p], values_PGF[p] = group, value_GF
        rewards_PG = weighted_sum(values_PGF, run.rewards.weights)
        if not algorithm.dynamic_sampling or attempt == algorithm.dynamic_sampling_attempts:
            break
        equal = has_equal_rewards(rewards_PG).nonzero().flatten().tolist()
        substitutes = {p: run.problems.substitute(step, p, attempt) for p in equal}
        places = [p for p, problem in substitutes.items() if problem is not None]
        for p in places:
            problems[p] = substitutes[p]
        if world.all_true(not places):
            break
    return groups, values_PGF, rewards_PG


def weighted_sum(values_PGF: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """``[P, G]`` over the functions that gave a value; NaN where none did."""
    rewards_PG = (values_PGF.nan_to_num(0.0) * torch.tensor(weights)).sum(dim=-1)
    return rewards_PG.masked_fill(values_PGF.isnan().all(dim=-1), torch.nan)


def with_old_and_ref_logprobs(run: Run, batch: Batch) -> Batch:
    """Add the log-probs of the policy that sampled and of the reference, by shifted cross-entropy without grad."""
    old_BT = ref_BT = None
    if run.config.algorithm.updates_per_step > 1:  # with one update, old = new.detach(): the same numbers, a pass saved
        old_BT = run.logprobs(run.bare_scorer, batch)
    if run.ref_scorer is not None:
        ref_BT = run.logprobs(run.ref_scorer, batch)
    return replace(batch, old_logprobs_BT=old_BT, ref_logprobs_BT=ref_BT)


def update(run: Run, minibatch: Batch, metrics: Accumulator, *, is_first_pass: bool) -> None:
    """One optimizer update from this rank's share of a minibatch."""
    config, world, algorithm = run.config, run.world, run.config.algorithm
    averaging = dict(aggregation=algorithm.aggregation, max_length=config.rollout.max_completion_length)
    # Counted over all ranks before the first backward: the gradient then does not depend on how the work is cut.
    denominator = world.sum(loss_denominator(minibatch.loss_mask_BT, **averaging)).clamp(min=1)
    for micro, is_last in microbatches(minibatch, config.optim.tokens_per_microbatch, packed=run.packed):
        with world.synchronise_if(is_last, run.scorer):
            with run.policy.autocast():
                new_BT, entropy_BT = run.scorer(*micro.scorer_inputs)
            old_BT = new_BT.detach() if micro.old_logprobs_BT is None else micro.old_logprobs_BT
            loss_sum, stats = policy_loss(
                new_BT,
                old_BT,
                micro.advantages_B,
                micro.loss_mask_BT,
                ref_logprobs_BT=micro.ref_logprobs_BT,
                objective=algorithm.objective,
                importance_level=algorithm.importance_level,
                epsilon=algorithm.epsilon,
                epsilon_high=algorithm.epsilon_high,
                delta=algorithm.delta,
                beta=algorithm.beta,
                kl_estimator=algorithm.kl_estimator,
                **averaging,
            )
            (loss_sum * world.size / denominator).backward()  # world.size undoes DDP's mean
        metrics.add_all(stats)
        metrics.add("loss", loss_sum.detach(), loss_denominator(micro.loss_mask_BT, **averaging))
        metrics.add("entropy", entropy_BT.sum(), micro.completion_mask_BT.sum())
        if is_first_pass:
            first_pass_metrics(run, metrics, micro, old_BT)
    if config.debug:
        debug.check_update(run, metrics)
    apply_update(run, metrics)


def main(argv: list[str]) -> int:
    world, run = None, None
    try:
        config: Config = load_config(argv, default_file=DEMO)
        world: World = start_world(**config.runtime.model_dump(include=WORLD_KEYS))
        run = prepare(config, world)
    except (ValueError, OSError, RanksDisagree) as mistake:  # what a user can mend
        return refuse(mistake, world)
    if run is not None:
        return run_to_completion(run, train)
    world.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

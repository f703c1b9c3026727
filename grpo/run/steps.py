"""The steps of a run, and what happens between them: evaluate, write, save, stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from grpo.algorithm.seeding import derive_seed
from grpo.checkpoint.saver import Progress
from grpo.config import EvalConfig
from grpo.distributed import Interrupted
from grpo.evaluation.collect import eval_sampling, evaluate
from grpo.evaluation.grading import Grader
from grpo.run.ending import print_result
from grpo.run.metrics import report_completions, step_line
from grpo.run.records import Run, Step
from grpo.system import UserError, seconds_waited_for_core, signs_of_life
from grpo.telemetry.console import evaluation_table


def remaining_steps(run: Run) -> Iterator[Step]:
    """Yield each step that is left, and finish it when the caller's loop asks for the next step.

    The loop makes the rollout and the updates of a step. Finishing a step means to write its
    metrics, evaluate, and save a checkpoint.

    Raises:
        Interrupted: on all ranks, after a step or in an evaluation, if a signal asks to stop.
    """
    log = run.log
    progress = run.progress
    # An evaluation is due here before training, or if the run was stopped before the evaluation of
    # its newest step was complete.
    evaluation = evaluate_if_due(run)
    if evaluation and progress.step > 0:
        log.saver.save_if_due(evaluation)

    while progress.step < run.max_steps:
        step = Step(progress.step)
        if not run.config.model.disable_dropout:
            # Nothing else in a step draws from PyTorch's global generators, so that seeding them
            # here makes a resumed run drop the same units.
            seed = derive_seed(run.config.seed, "dropout", step.number, run.world.rank)
            torch.manual_seed(seed)
        started = time.perf_counter()
        waited_before = seconds_waited_for_core()
        name = f"step {step.number + 1}/{run.max_steps}"
        with signs_of_life(name, is_shown=run.world.is_main):
            yield step

        # Here the loop has made all updates of the step. A run that continues computes the learning
        # rate from the number of its step alone.
        per_step = run.config.algorithm.updates_per_step
        num_more = run.learner.lr_schedule.last_epoch - (step.number + 1) * per_step
        if num_more:
            raise UserError(
                f"{name} made {per_step + num_more} updates, and the learning-rate schedule is for "
                f"{per_step}, algorithm.num_iterations times algorithm.num_minibatches"
            )
        seconds = time.perf_counter() - started
        waited = seconds_waited_for_core() - waited_before
        step.metrics.maximum("step_time", seconds)
        step.metrics.maximum("time/frac_core_wait", waited / seconds)
        line = step_line(run, step)
        # The step is completed first: if writing below fails, it can still be saved.
        progress.complete_step(line, run.world)
        report_completions(run, step)
        log.reporter.step(line, evaluation_follows=_evaluation_is_due(run))

        # The evaluation comes before the save, which records that this step has been evaluated.
        evaluation = evaluate_if_due(run)
        log.saver.save_if_due(evaluation)
        save, stop = log.signals.vote()
        if save:
            log.saver.save_newest()
        # After the last step there is nothing left to stop.
        is_last = progress.step == run.max_steps
        if stop and not is_last:
            raise Interrupted

    print_result(run)


def evaluate_if_due(run: Run) -> dict[str, float]:
    """Evaluate the newest weights if an evaluation is due, and return its ``eval/...`` metrics.
    Otherwise return an empty dictionary."""
    progress = run.progress
    if not _evaluation_is_due(run):
        return {}

    config = run.config
    world = run.world
    reporter = run.log.reporter
    # The limit of a rollout, which the try of the largest step may have lowered.
    sampling = replace(
        eval_sampling(config), tokens_in_flight=run.sampler.sampling.tokens_in_flight
    )
    grader = Grader(config.eval, run.tasks.rewards, run.trainer_state)
    seconds = {}
    with world.timed("eval", seconds), run.sampler.current_weights():
        evaluation = evaluate(
            run.sampler.engine,
            run.tasks.eval_problems,
            grader,
            world,
            sampling,
            # Each evaluation has the same seeds, so that metrics differ by the weights alone.
            seed=config.seed,
        )
    metrics = evaluation.metrics
    reporter.evaluation(progress.step, metrics, evaluation.intervals, seconds["eval"])
    if evaluation.num_unscored:
        reporter.print(
            f"warning: {evaluation.num_unscored} completions of this evaluation have no value of "
            f"{grader.correctness}, which decides what is correct (eval.correctness), and count as "
            "wrong"
        )

    progress.evaluated_step = progress.step
    if progress.step == 0:
        progress.before = metrics
    elif progress.step == run.max_steps:
        reporter.print(evaluation_table(progress.before, metrics))
    return metrics


def _evaluation_is_due(run: Run) -> bool:
    """True if an evaluation of a run's newest weights is due, and the run has problems to evaluate
    on."""
    has_problems = bool(run.tasks.eval_problems)
    return has_problems and evaluation_is_due(run.progress, run.config.eval, run.max_steps)


def evaluation_is_due(
    progress: Progress,
    settings: EvalConfig,
    max_steps: int,
) -> bool:
    """True if the newest weights are to be evaluated, and have not been evaluated yet."""
    step = progress.step
    # A continued run may have made more steps than its new max_steps.
    if progress.evaluated_step == step or step > max_steps:
        return False
    if step == 0:
        return settings.before_training
    is_regular = settings.every is not None and step % settings.every == 0
    return is_regular or step == max_steps

"""The end of a run: complete, stopped by a signal, or failed; in each case with the newest complete step on disk."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable

from grpo.checkpoint.saver import how_to_continue
from grpo.distributed import Interrupted, OtherRankFailed
from grpo.evaluation.grading import correctness_note
from grpo.run.records import Run
from grpo.system import UserError, first_line


def run_to_completion(run: Run, train: Callable[[Run], None], *, ends_process: bool = True) -> int:
    """Train, and return the exit code: 0 when complete, 128 + signal number after a signal that asks to stop.

    After a failure a checkpoint is saved first, if no update was under way, so that only the current step is lost. Then
    this process ends at once with code 1: the other ranks may wait for it in a collective, and torchrun ends them. A
    rank that is alone in a program that goes on afterwards (``ends_process=False``) raises the failure instead.
    """
    ends_process = ends_process or not run.world.is_alone
    try:
        code = _train_and_save(run, train)
    except BaseException as failure:
        with contextlib.suppress(Exception):  # of a full disk, for example: it must not hide the failure
            note = _rescue(run)
            if ends_process:
                _print_failure(run, failure, note)
            else:
                failure.add_note(f"grpo.train: in phase {run.world.phase!r} of step {run.progress.step + 1}")
                if note:
                    failure.add_note(f"grpo.train: {note}")
        with contextlib.suppress(Exception):
            run.close()
        if ends_process:
            run.world.exit_now(1)
        raise
    run.close()
    return code


def _train_and_save(run: Run, train: Callable[[Run], None]) -> int:
    """Train, and save the newest complete step. Returns the exit code."""
    try:
        train(run)
        code = 0
    except Interrupted:  # raised on all ranks after a vote
        code = run.log.signals.exit_code
    assert not run.progress.mid_update, "an update is never interrupted"
    run.log.saver.save_newest()
    if code:
        rest = how_to_continue(run.config) if run.progress.step else "there is nothing to save"
        run.log.reporter.print(f"stopped at step {run.progress.step} of {run.max_steps}: {rest}")
    return code


def print_result(run: Run) -> None:
    """Print the folders of the last and of the best checkpoint, and the hints that hold for the last steps."""
    show = run.log.reporter.print
    output = run.config.output_dir
    kind = "a Hugging Face folder"
    if run.learner.policy.adapter:
        kind = "a LoRA adapter (python -m grpo.merge makes it a whole model)"
    show(f"saved     {output}/checkpoint-{run.max_steps}, {kind}")
    note = correctness_note(run.config.eval, run.tasks.rewards.names)
    if run.tasks.eval_problems and note:
        show(note)
    best = run.progress.best
    if best:
        name = run.config.checkpoint.keep_best
        step = best["step"]
        value = best["value"]
        show(f"best      {output}/checkpoint-{step}, {name} {value:.4g}")
    for hint in run.log.reporter.hints.verdict().values():
        show(f"verdict   {hint}")


def _rescue(run: Run) -> str | None:
    """Save the newest complete step; returns a note on it."""
    try:
        return run.log.saver.rescue()
    except Exception as error:  # the device may be unable to return the weights
        return f"the state could not be saved: {type(error).__name__}: {error}"


def _print_failure(run: Run, failure: BaseException, note: str | None) -> None:
    """One line on the rank that failed, after a traceback unless the user can mend the error; and the note."""
    if isinstance(failure, OtherRankFailed):
        note = note if run.world.is_main else None
    else:
        error = first_line(failure)
        if not isinstance(failure, UserError):
            traceback.print_exception(failure)
            error = f"{type(failure).__name__}: {error}"
        print(f"error: [rank {run.world.rank}] in phase {run.world.phase!r}: {error}", file=sys.stderr)
    if note:
        print(f"note: {note}", file=sys.stderr)
    sys.stderr.flush()

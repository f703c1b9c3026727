"""The end of a run: complete, asked to stop, or failed; in each case with the newest complete step on disk."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable

from grpo.checkpoint.saver import how_to_continue
from grpo.distributed import Interrupted, OtherRankFailed
from grpo.run.state import Run
from grpo.system import UserError, first_line


def run_to_completion(run: Run, train: Callable[[Run], None]) -> int:
    """Train, and return the exit code: 0 when complete, 128 + signal number when asked to stop.

    A failure ends this process at once with code 1, after an error message. If no update was under way, a checkpoint is saved first, so
    that only the current step is lost.
    """
    code = _finish_or_end_process(run, train)
    run.world.shutdown()
    return code


def _finish_or_end_process(run: Run, train: Callable[[Run], None]) -> int:
    try:
        code = train_and_save(run, train)
    except BaseException as failure:
        # The process ends below; nothing before that may wait for other ranks, which may wait for this one.
        with contextlib.suppress(Exception):  # the disk of a log file, or of the run, may be full
            _rescue(run, failure)
        with contextlib.suppress(Exception):
            run.close()
        run.world.exit_now(1)
    run.close()
    return code


def run_inside_program(run: Run, train: Callable[[Run], None]) -> int:
    """As :func:`run_to_completion`, in a program that goes on afterwards: a failure is raised, with a note on what was saved, instead of
    ending the process, and the ranks stay connected.

    With several ranks a failure ends the process here too: the others may wait for this rank, which cannot join them again.
    """
    if not run.world.is_alone:
        return _finish_or_end_process(run, train)
    with contextlib.ExitStack() as at_end:
        at_end.callback(run.close)
        try:
            return train_and_save(run, train)
        except BaseException as failure:
            with contextlib.suppress(Exception):
                failure.add_note(f"grpo.train: in phase {run.world.phase!r} of step {run.progress.step + 1}")
                if note := _rescue(run, failure, print_error=False):
                    failure.add_note(f"grpo.train: {note}")
            with contextlib.suppress(Exception):
                at_end.close()  # its errors must not hide the failure
            raise


def train_and_save(run: Run, train: Callable[[Run], None]) -> int:
    """Train, and save the newest complete step. Returns the exit code of :func:`run_to_completion`."""
    progress = run.progress
    try:
        train(run)
        code = 0
    except Interrupted:  # raised on all ranks after a vote
        code = run.signals.exit_code
    assert not progress.mid_update, "an update is never interrupted"
    run.saver.save_newest()
    if code:
        run.reporter.print(f"preempted at step {progress.step} of {run.max_steps}: {how_to_continue(run.config)}")
    return code


def print_result(run: Run) -> None:
    """Print the folders of the last and of the best checkpoint."""
    output = run.config.output_dir
    kind = (
        "a LoRA adapter (python -m grpo.merge makes it a whole model)"
        if run.policy.adapter
        else "a Hugging Face folder"
    )
    run.reporter.print(f"saved     {output}/checkpoint-{run.max_steps}, {kind}")
    if best := run.progress.best:
        name = run.config.checkpoint.keep_best
        run.reporter.print(f"best      {output}/checkpoint-{best['step']}, {name} {best['value']:.4g}")


def _rescue(run: Run, failure: BaseException, print_error: bool = True) -> str | None:
    """Save what can be saved; then print the error on the rank where it happened. Returns the note on what was saved."""
    rank, phase = run.world.rank, run.world.phase
    run.signals.announce_failure(f"rank {rank} has failed in phase {phase!r}")
    try:
        note = run.saver.rescue()
    except Exception as error:  # the device may be unable to return the weights
        note = f"the state could not be saved: {type(error).__name__}: {error}"
    if not print_error:
        return note
    if not isinstance(failure, OtherRankFailed):
        error = first_line(failure)
        if not isinstance(failure, UserError):
            traceback.print_exception(failure)
            error = f"{type(failure).__name__}: {error}"
        print(f"error: [rank {rank}] in phase {phase!r}: {error}", file=sys.stderr)
    elif not run.world.is_main:
        note = None  # the rank that failed says it
    if note:
        print(f"note: {note}", file=sys.stderr)
    sys.stderr.flush()
    return note

"""The end of a run, which is complete, stopped by a signal, or failed.

Afterwards the newest complete step is on disk, unless a failure made it impossible to save.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable

from grpo.checkpoint.saver import how_to_continue
from grpo.distributed import Interrupted, OtherRankFailed
from grpo.run.records import Run
from grpo.system import UserError, first_line


def run_to_completion(run: Run, train: Callable[[Run], None], *, ends_process: bool = True) -> int:
    """Train, and return the exit code: 0 when complete, 128 + signal number after a stop signal.

    After a failure a checkpoint is saved first, if no update was under way, so that only the
    current step is lost. Then this process ends at once with code 1: the other ranks may wait for
    it in a collective, and torchrun ends them.

    Args:
        train: the training loop, if the configuration names none.
        ends_process: False if a calling program goes on afterwards. Then a run of one process
            raises the failure. The processes of several ranks end all the same.
    """
    # A rank that only raised the failure would leave the others waiting.
    ends_process = ends_process or not run.world.is_single_process
    code = 0
    try:
        try:
            loop = run.user_loop or train
            loop(run)
        except Interrupted:  # raised on all ranks after a vote
            code = run.log.signals.exit_code
        assert not run.progress.mid_update, (
            "the loop has left a step that remaining_steps has not finished"
        )
        run.log.saver.save_newest()
    except BaseException as failure:
        # A second error from here on, for example of a full disk, must not hide the failure.
        with contextlib.suppress(Exception):
            _rescue_and_report(run, failure, ends_process)
        with contextlib.suppress(Exception):
            run.close()
        if ends_process:
            run.world.exit_now(1)
        raise

    if code:
        run.log.reporter.print(
            f"stopped at step {run.progress.step} of {run.max_steps}: {how_to_continue(run.config)}"
        )
    run.close()
    return code


def print_result(run: Run) -> None:
    """Print the folders of the last and the best checkpoint, and the hints that hold at the end."""
    show = run.log.reporter.print
    hints = run.log.reporter.hints
    if not run.config.debug:
        kind = "a LoRA adapter" if run.learner.policy.adapter else "a Hugging Face folder"
        show(
            f"saved     {run.config.output_dir}/checkpoint-{run.max_steps}, {kind}; "
            f"{sys.executable} -m grpo.report {run.config.output_dir} draws the run"
        )
    best = run.progress.best
    if best:
        show(
            f"best      {run.config.output_dir}/checkpoint-{best['step']}, "
            f"{run.config.checkpoint.keep_best} {best['value']:.4g}"
        )
    for name, hint in hints.verdict().items():
        # The first sentence says what is so. The advice stands where the hint was given.
        if name in hints.given:
            hint = hint.partition(". ")[0]
        show(f"at end    {hint}")


def _rescue_and_report(run: Run, failure: BaseException, ends_process: bool) -> None:
    """Save the newest complete step, and report the failure. If the process ends, the failure is
    printed. Otherwise the report is added to the exception by ``add_note``."""
    try:
        saved = run.log.saver.rescue()
    except Exception as error:  # the device may be unable to return the weights
        saved = f"the state could not be saved: {type(error).__name__}: {error}"
    place = f"in phase {run.world.phase!r}"
    # A note on the failure, because Python prints it with the traceback.
    if not ends_process:
        failure.add_note(
            f"grpo.train: {place} of step {run.progress.step + 1}; {saved or 'nothing new to save'}"
        )
        return

    # Only the rank that failed prints the error.
    if not isinstance(failure, OtherRankFailed):
        error = first_line(failure)
        # The message of a user's mistake says how to mend it; a traceback would bury it.
        if not isinstance(failure, UserError):
            traceback.print_exception(failure)
            error = f"{type(failure).__name__}: {error}"
        print(f"error: [rank {run.world.rank}] {place}: {error}", file=sys.stderr)
    if saved:
        print(f"note: {saved}", file=sys.stderr)

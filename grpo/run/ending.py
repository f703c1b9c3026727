"""How a run ends: done, asked to stop, or failed; in each case with the newest whole state on disk."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

from grpo.distributed import Interrupted, RanksDisagree
from grpo.run.saver import how_to_continue


def run_to_completion(run: Any, train: Callable[[Any], None]) -> int:
    """Train (a ``grpo.run.state.Run``), and return the exit code: 0 when done, 128 + signal when asked to stop.

    A failure ends this process at once with code 1, after a message and, where the weights are those of a step boundary, a
    checkpoint: what went wrong then costs the current step and no more.
    """
    try:
        try:
            train(run)
            run.saver.finish()
            code = 0
        except Interrupted:  # on all ranks: they have voted
            _preempted(run)
            code = run.signals.exit_code
    except BaseException as failure:
        # Not handled, only told: what follows must not hang on ranks that wait for this one.
        _tell(run, failure)
        with contextlib.suppress(Exception):  # a full disk again, say: it has been told
            run.close()
        run.world.abandon(1)
    run.close()
    run.world.shutdown()
    return code


def _preempted(run: Any) -> None:
    saver = run.saver
    saver.finish()
    assert saver.whole_step is not None, "an update is never broken off"
    if saver.whole_step > saver.saved:
        saver.save(saver.whole_step)
        saver.finish()
    run.reporter.print(f"preempted at step {saver.whole_step} of {run.max_steps}: {how_to_continue(run.config)}")


def _tell(run: Any, failure: BaseException) -> None:
    """The rank that failed says what happened; one that heard of it from another has nothing to add."""
    world = run.world
    if not isinstance(failure, RanksDisagree):
        traceback.print_exception(failure)
        line = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        print(f"error: [rank {world.rank}] in phase {world.phase!r}: {type(failure).__name__}: {line}", file=sys.stderr)
    try:
        rescued = run.saver.rescue()
    except Exception as error:  # the device may be in no state to give the weights back
        rescued = f"the state could not be saved: {type(error).__name__}: {error}"
    if rescued:
        print(f"note: {rescued}", file=sys.stderr)
    sys.stderr.flush()

"""Errors that the user can fix."""

import signal
import sys
import time

from grpo.distributed import World, launch_environment
from grpo.system import printable


def print_user_error(error: BaseException) -> None:
    """Print an error on stderr, without a traceback; each line of its message starts with ``error:
    ``."""
    for line in printable(str(error)).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


def exit_with_user_error(error: BaseException, world: World | None) -> int:
    """Print an error once across ranks. With one rank, return the code 2 (130 after Ctrl-C); else
    end the process.

    Connected ranks all know the error, and rank 0 prints it. If the ranks are not connected yet
    (``world`` is None), the first rank of each machine prints, and a rank that fails alone prints
    too."""
    rank, _, local_rank, _ = launch_environment()
    is_first = (local_rank if world is None else rank) == 0
    if not is_first:
        time.sleep(
            2
        )  # torchrun ends all ranks as soon as one ends: leave time for the rank that prints
    if is_first or world is None:
        print_user_error(error)
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 2
    if world is not None and not world.is_single_process:
        world.exit_now(code)
    return code

"""Messages on the terminal for errors that the user can fix."""

import signal
import sys
import time

from grpo.distributed import World, launch_environment
from grpo.system import printable


def print_user_error(error: BaseException) -> None:
    """Print an error on stderr without a traceback. Each line of its message gets the prefix
    ``error:``."""
    for line in printable(str(error)).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


def exit_with_user_error(error: BaseException, world: World | None) -> int:
    """Print an error once, and end this process if it is one of several connected ranks.

    Args:
        world: the connected ranks. All have the same error, and rank 0 prints it. None if the ranks
            are not connected yet: the first rank of each machine prints its error at once, and the
            other ranks print theirs if they still run two seconds later.

    Returns:
        The exit code, if the process goes on: 2, or 130 after Ctrl-C.
    """
    rank, _, local_rank, _ = launch_environment()
    is_first = (local_rank if world is None else rank) == 0
    if not is_first:
        # torchrun ends all ranks as soon as one rank ends, so the first rank gets time to print.
        time.sleep(2)
    if is_first or world is None:
        print_user_error(error)
    # The shell's code for a program that a signal has ended.
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 2
    if world is not None and not world.is_single_process:
        world.exit_now(code)
    return code

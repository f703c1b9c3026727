"""Standard streams, from which a reader may go away, and errors that the user can fix."""

import io
import os
import signal
import sys
import time
from typing import Any

from grpo.distributed import World, launch_environment
from grpo.system import printable


def survive_lost_readers() -> None:
    """Let this process go on when its output has no reader (a closed pipe, terminal or stream), or a full disk."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed by the shell (`>&-`): the next file that is opened would get its number
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this one
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else the caller's own stream
            output = io.BufferedWriter(_Output(number, "w", closefd=False))
            text = io.TextIOWrapper(output, errors="backslashreplace", line_buffering=True)
            setattr(sys, name, text)


class _Output(io.FileIO):
    """A standard stream that becomes /dev/null when nobody can read it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def print_user_error(error: BaseException) -> None:
    """Print an error on stderr, without a traceback; each line of its message starts with ``error: ``."""
    for line in printable(str(error)).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


def exit_with_user_error(error: BaseException, world: World | None) -> int:
    """Print an error once across ranks. With one rank, return the code 2 (130 after Ctrl-C); else end the process.

    Connected ranks all know the error, and rank 0 prints it. If the ranks are not connected yet (``world`` is None),
    the first rank of each machine prints, and a rank that fails alone prints too.
    """
    rank, _, local_rank, _ = launch_environment()
    is_first = (local_rank if world is None else rank) == 0
    if not is_first:
        time.sleep(2)  # torchrun ends all ranks as soon as one ends: leave time for the rank that prints
    if is_first or world is None:
        print_user_error(error)
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 2
    if world is not None and not world.is_alone:
        world.exit_now(code)
    return code

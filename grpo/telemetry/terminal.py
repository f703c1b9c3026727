"""Standard streams, from which a reader may go away, and errors that the user can fix."""

import errno
import io
import os
import signal
import sys
import time
from typing import Any

from grpo.distributed import World, launch_environment
from grpo.system import printable


def survive_lost_readers() -> None:
    """Let this process go on when its output has no reader (a closed pipe, terminal or stream)."""
    _wrap_streams(ends_process=False)


def end_without_reader() -> None:
    """Let this process end, with the exit code of SIGPIPE, once nobody reads its output (``... | head -1``).

    For commands that only print. (SIGPIPE itself would also end a process whose reward worker has ended.)
    """
    _wrap_streams(ends_process=True)


def _wrap_streams(*, ends_process: bool) -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed by the shell (`>&-`): the next file that is opened would get its number
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else the caller's own stream
            options = dict(encoding=stream.encoding, errors=stream.errors) if stream else {}
            output = io.BufferedWriter(_Output(number, ends_process=ends_process))
            setattr(sys, name, io.TextIOWrapper(output, line_buffering=True, **options))


class _Output(io.FileIO):
    """A standard stream that becomes /dev/null, or ends the process, when nobody reads it any more."""

    def __init__(self, number: int, *, ends_process: bool):
        super().__init__(number, "w", closefd=False)
        self._ends_process = ends_process

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC):  # a closed pipe or terminal, a full disk
                raise
            if error.errno == errno.ENOSPC and self.fileno() == 1:
                print("warning: the disk of the standard output is full: further lines are lost", file=sys.stderr)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        if self._ends_process:
            sys.exit(128 + signal.SIGPIPE)
        return len(data)


def print_user_error(error: Exception) -> None:
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
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 2
    if is_first and code != 2:
        print("stopped before the first step: there is nothing to save", flush=True)
    elif is_first or world is None:
        print_user_error(error)
    if world is not None and not world.is_alone:
        world.exit_now(code)
    return code

"""Errors that the user can fix, such as a wrong setting: printed once, without a traceback, exit code 2."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from grpo.distributed import World, launch_environment
from grpo.system import printable


def print_user_error(error: Exception) -> None:
    """Print an error on stderr; each line of its message starts with ``error: ``."""
    text, home = str(error), os.path.expanduser("~")
    if f"{home}/.cache" in text and not (os.path.isdir(home) and os.access(home, os.W_OK)):
        text += f"; the home folder {home} is not writable: set XDG_CACHE_HOME to a writable folder"
    for line in printable(text).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


def exit_with_user_error(error: Exception, world: World | None) -> int:
    """Print an error once across ranks. With one rank, return the exit code 2; with several, end this process.

    Connected ranks all know the error, and rank 0 prints it. If the ranks are not connected yet (``world`` is None), the first rank of
    each machine prints, and a rank that fails alone prints too.
    """
    rank, _, local_rank, _ = launch_environment()
    is_first = (local_rank if world is None else rank) == 0
    if not is_first:
        time.sleep(2)  # torchrun ends all ranks as soon as one ends: leave time for the rank that prints
    if is_first or world is None:
        print_user_error(error)
        _tell_torchrun(error)
    if world is not None and not world.is_alone:
        world.exit_now(2)
    return 2


def _tell_torchrun(error: Exception) -> None:
    """Write the error where torchrun looks for it: the table that torchrun prints in the end then has it in its last line."""
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
        return
    text = printable(str(error))
    details = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": details}), encoding="utf-8")

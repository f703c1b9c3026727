"""Keeps one server running while the trainer lives: ``python keeper.py TRAINER_PID LOG HOST PORT COMMAND ...``, standard library only.

The command gets a process group of its own. Once the trainer has said by SIGUSR1 that the server answers, it is started again when it
dies, at most ``MAX_RESTARTS`` times in a row; before that, its end is the keeper's end. A server that listens no longer counts as dead: after
the death of its engine, vLLM's front end may wait for requests that never end. When the trainer has gone, also by ``kill -9``, or
on SIGTERM, the whole group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, TextIO

MAX_RESTARTS = 3
STEADY_S = 600.0
"""A server that has run so many seconds counts as well again: restarts are counted from 0."""
POLL_S, TRY_S = 0.2, 1.0
"""Seconds between two looks at the processes, and at the server's port."""
DEAF_S = 5.0
"""Seconds without a listening port, after it has listened, after which a server is ended."""
TERM_S, ALONE_S, KILL_S = 10.0, 2.0, 10.0
"""Seconds that a process group has after SIGTERM, after SIGKILL of its first process, and after SIGKILL of all."""
LAST_LINE = "grpo: keeper {} does not start its server again\n"
"""In the log, with the keeper's process id."""
LAST_BYTES = 2**16
"""The end of the log, in which that line is looked for: other programs may write to the same log."""


class Ended(Exception):
    """The trainer has gone, or has sent SIGTERM."""


def main(argv: list[str]) -> int:
    """Returns 0 on SIGTERM or after the trainer, else the exit code of the server."""
    trainer, log, host, port, *command = argv
    answered_at: list[float] = []
    signal.signal(signal.SIGUSR1, lambda *_: answered_at.append(time.monotonic()))
    signal.signal(signal.SIGTERM, _raise_ended)
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes that the server leaves behind become children of the keeper
    restarts = 0
    with open(log, "a", buffering=1, encoding="utf-8") as file:
        try:
            while True:
                started = time.monotonic()
                code = run_once(command, file, int(trainer), (host, int(port)), answered_at)
                restarts = 1 if time.monotonic() - started > STEADY_S else restarts + 1
                if not answered_at or restarts > MAX_RESTARTS:
                    print(f"grpo: the server ended ({code})", file=file)
                    file.write(LAST_LINE.format(os.getpid()))
                    return code if code > 0 else 1
                print(f"grpo: the server ended ({code}); restart {restarts} of {MAX_RESTARTS}", file=file)
        except Ended:
            return 0


class KeptLog(NamedTuple):
    """The log of a server that a keeper runs."""

    path: Path
    keeper: int
    """Process id."""

    def end(self) -> str | None:
        """The reason, behind the server's name, why its keeper does not start it again; None: it does."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:  # no such file, or too many open ones
            file.seek(max(self.path.stat().st_size - LAST_BYTES, 0))
            if LAST_LINE.format(self.keeper) in file.read().decode(errors="replace"):
                return "has ended too often and is not started again"
        return None if is_running(self.keeper) else "has lost the process that starts it again (keeper.py)"


def is_running(pid: int) -> bool:
    """False if a process has ended, also if its parent has not noticed yet. On Linux; elsewhere True."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return not Path("/proc/self").exists()
    except OSError:
        return True


def run_once(command: list[str], log: TextIO, trainer: int, address: tuple[str, int], answered_at: list[float]) -> int:
    """Start the command, wait until it ends or listens no longer, end what is left of its process group; returns its exit code.

    Raises:
        Ended: if the trainer has gone or SIGTERM has come. The process group has ended then too.
    """
    streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    server = subprocess.Popen(command, **streams, start_new_session=True, preexec_fn=_end_with_keeper)
    try:
        listened_at, tried_at, num_answered = None, 0.0, len(answered_at)
        while server.poll() is None:
            if os.getppid() != trainer:
                raise Ended
            if (now := time.monotonic()) - tried_at > TRY_S:
                tried_at = now
                if not is_refused(address) or (listened_at is None and len(answered_at) > num_answered):
                    listened_at = now
                elif listened_at is not None and now - listened_at > DEAF_S:
                    print("grpo: the server listens no longer and is ended", file=log)
                    return 1
            time.sleep(POLL_S)
        return server.returncode
    finally:
        # Held back, not ignored: it still ends the keeper afterwards.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        end_group(server.pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def is_refused(address: tuple[str, int]) -> bool:
    """True if nothing listens at the address."""
    try:
        socket.create_connection(address, 1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # a server that is too busy to accept the connection listens
        pass
    return False


def end_group(group: int) -> None:
    """End all processes of a group: SIGTERM, then SIGKILL to the first one, whose helpers then remove its shared memory, then to all."""
    ways = (os.killpg, signal.SIGTERM, TERM_S), (os.kill, signal.SIGKILL, ALONE_S), (os.killpg, signal.SIGKILL, KILL_S)
    for send, number, seconds in ways:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):
            send(group, number)
        while exists(group) and time.monotonic() < deadline:
            time.sleep(0.05)


def exists(group: int) -> bool:
    """True if the group has a process. Children that have ended are reaped: they would count."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _raise_ended(*_: object) -> None:
    raise Ended


def _end_with_keeper() -> None:
    """In the server, before its program: it gets SIGTERM when the keeper itself is killed."""
    _prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def _prctl(option: int, value: int) -> None:
    """Linux only: elsewhere nothing happens."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

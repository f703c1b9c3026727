"""Asked to stop, or to save: signals become decisions that all ranks take together.

SIGTERM, SIGINT and SIGHUP: stop, keeping the newest whole state. A rollout or an evaluation, during which the weights stand still, is
broken off at once; an update is brought to its end. SIGUSR1: save at the end of this step and go on.

One rank's signal is every rank's: it is put up where the others look twice a second, and voted on before anything is done. The
kernel tells a thread of ours of each signal (``set_wakeup_fd``), also while the main thread waits inside a collective for ranks
that may never come; so a second signal always ends the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

import torch

from grpo.distributed import Interrupted, World, open_noticeboard

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SECONDS = 3.0
"""Ctrl-C reaches a rank twice, from the terminal and from torchrun: signals this close together are one."""
PATIENCE_SECONDS = 10.0
"""A rank that has not left so long after a signal says what it is doing (torchrun kills it after 30 s)."""
LOOK_SECONDS = 0.5


def not_yet() -> None:
    """Until there is something to save: a request to save must not end the process, as it would by default; one to stop may."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Signals:
    """Installed from the start of a run until :meth:`close`; in another thread than the main one it does nothing."""

    def __init__(self, world: World):
        self.world = world
        self.stop_signal: int | None = None
        """The signal that asked to stop, on this rank or another."""
        self.save_wanted = False
        self._may_break_off = False
        self._first: float | None = None
        self._said = False
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return
        self._board = open_noticeboard(world)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {}
        for number in (*STOP, signal.SIGUSR1):
            # Under nohup a hang-up stays ignored.
            if number == signal.SIGUSR1 or signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._in_main_thread)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")
        self._thread.start()
        world.local_work = self.local_work

    @contextlib.contextmanager
    def local_work(self) -> Iterator[None]:
        """Work that a signal to stop breaks off.

        Raises:
            Interrupted: in the middle of it, or at once if the signal came before.
        """
        self._may_break_off = True
        try:
            if self.stop_signal is not None:
                raise Interrupted
            yield
        finally:
            self._may_break_off = False

    def agree(self) -> tuple[bool, bool]:
        """A vote at a step boundary: ``(save, stop)``, the same on all ranks."""
        save, stop = self.world.max(torch.tensor([float(self.save_wanted), float(self.stop_signal or 0)])).tolist()
        if save:
            self.save_wanted = False
        if stop:
            self.stop_signal = int(stop)
        return bool(save), bool(stop)

    @property
    def exit_code(self) -> int:
        """As a shell has it for a process that a signal ended; torchrun with ``--max-restarts`` starts it again."""
        return 128 + (self.stop_signal or signal.SIGTERM)

    def close(self) -> None:
        """Put things back as they were."""
        if not self._installed:
            return
        self._installed = False
        self.world.local_work = contextlib.nullcontext
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write)  # ends the thread
        self._thread.join(timeout=5)
        os.close(self._read)

    def _in_main_thread(self, number: int, frame: object) -> None:
        if number == signal.SIGUSR1:
            self.save_wanted = True
            return
        self.stop_signal = self.stop_signal or number
        if self._may_break_off:
            self._may_break_off = False
            raise Interrupted

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], LOOK_SECONDS)
            if ready:
                numbers = os.read(self._read, 64)
                if not numbers:
                    return
                for number in numbers:
                    if number in STOP:
                        self._asked_to_stop(number)
            elif self._first is None:
                self._look_at_the_board()
            elif not self._said and time.monotonic() - self._first > PATIENCE_SECONDS:
                self._said = True
                self._say(f"was asked to stop {PATIENCE_SECONDS:g} s ago and is still in phase {self.world.phase!r}")

    def _asked_to_stop(self, number: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self.stop_signal = now, self.stop_signal or number
            with contextlib.suppress(RuntimeError):  # the others may be gone
                if self._board is not None:
                    self._board.write(str(number))
        elif now - self._first > SAME_SECONDS:
            self._say(f"{signal.Signals(number).name} for the second time: left at once in phase {self.world.phase!r}")
            os._exit(128 + number)

    def _look_at_the_board(self) -> None:
        try:
            word = self._board.read() if self._board is not None else None
        except RuntimeError:  # torchrun has gone, or is going
            self._board = None
            return
        if word is not None:  # as if the signal had been sent to us
            signal.pthread_kill(threading.main_thread().ident, int(word))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"[rank {self.world.rank}] {text}", file=sys.stderr, flush=True)

"""Signals that ask a run to stop or to save, and the votes of all ranks on them.

SIGTERM, SIGINT and SIGHUP stop the run. A rollout or an evaluation, which does not change the
weights, ends at once; an update is finished first. SIGUSR1 saves a checkpoint at the end of the
current step. A signal to one rank counts for all: ranks vote at the end of each rollout and of each
step. A second stop signal raises KeyboardInterrupt, which ends the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import torch

from grpo.distributed import Interrupted, World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 3.0
"""Seconds after the first stop signal, in which more stop signals count as the same. Ctrl-C reaches
a rank twice, from the terminal and from torchrun."""


class Signals:
    """Signal handlers, installed from construction until :meth:`close`."""

    def __init__(self, world: World):
        self.world = world
        self.save_requested = False
        self._first_stop: float | None = None
        """Time of the first stop signal, in seconds of the monotonic clock."""
        self._old_handlers = {}
        # Python calls handlers in the main thread, and installs them nowhere else.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            # Under nohup SIGHUP stays ignored, so that the run outlives its terminal.
            if number == signal.SIGUSR1 or signal.getsignal(number) is not signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._handle)

    def vote(self) -> tuple[bool, bool]:
        """Return ``(save, stop)`` at the end of a step. Each is True on all ranks if any rank got a
        signal to save or to stop."""
        rank_requests = [int(self.save_requested), self.world.stop_signal or 0]
        requests = self.world.max(torch.tensor(rank_requests))
        save, stop = requests.tolist()
        if save:
            self.save_requested = False
        if stop:
            # All ranks take the same signal number, so that all have the same exit code.
            self.world.stop_signal = stop
        return bool(save), bool(stop)

    @property
    def exit_code(self) -> int:
        """128 + signal number, as a shell reports a process that a signal ended."""
        # Not 0: torchrun would take the run for complete, and never restart it.
        return 128 + (self.world.stop_signal or signal.SIGTERM)

    def close(self) -> None:
        """Restore the handlers that were installed before."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if number == signal.SIGUSR1:
            self.save_requested = True
            return
        now = time.monotonic()
        self.world.stop_signal = self.world.stop_signal or number
        self._first_stop = self._first_stop or now
        if now - self._first_stop > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt(f"second {signal.Signals(number).name}")
        # In an update nothing is raised: weights that are half updated could not be saved.
        if self.world.may_interrupt:
            self.world.may_interrupt = False
            raise Interrupted
        # print() could be in the middle of a line, and must not be entered twice.
        if self.world.is_main:
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(2, b"stopping, once an update or a save that has begun is complete\n")

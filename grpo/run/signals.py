"""Signals that ask a run to stop or to save, turned into decisions that all ranks take together.

SIGTERM, SIGINT and SIGHUP stop the run: a rollout or an evaluation, which does not change the
weights, at once; an update is finished first. SIGUSR1 saves a checkpoint at the end of the current
step. A signal to one rank counts for all: ranks vote at the end of each rollout and of each step. A
second stop signal raises KeyboardInterrupt, which ends the run."""

from __future__ import annotations

import signal
import threading
import time

import torch

from grpo.distributed import Interrupted, World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 3.0
"""Ctrl-C reaches a rank twice, from the terminal and from torchrun: signals this close together
count as one."""


class Signals:
    """Signal handlers, installed from construction until :meth:`close`; none outside the main
    thread."""

    def __init__(self, world: World):
        self.world = world
        self.save_requested = False
        self._first_stop: float | None = None
        self._old_handlers = {}
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, signal.SIGUSR1):
                # Under nohup SIGHUP stays ignored.
                if number == signal.SIGUSR1 or signal.getsignal(number) is not signal.SIG_IGN:
                    self._old_handlers[number] = signal.signal(number, self._handle)

    def vote(self) -> tuple[bool, bool]:
        """``(save, stop)`` at the end of a step: True if any rank got such a signal. All ranks get
        the same answer."""
        local_requests = [int(self.save_requested), self.world.stop_signal or 0]
        save, stop = self.world.max(torch.tensor(local_requests)).tolist()
        if save:
            self.save_requested = False
        if stop:
            self.world.stop_signal = stop
        return bool(save), bool(stop)

    @property
    def exit_code(self) -> int:
        """128 + signal number, as a shell reports a process that a signal ended; torchrun may then
        restart it."""
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
        if self.world.may_interrupt:
            self.world.may_interrupt = False
            raise Interrupted

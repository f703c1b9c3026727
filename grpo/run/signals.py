"""Signals that ask a run to stop or to save, turned into decisions that all ranks take together.

SIGTERM, SIGINT and SIGHUP stop the run: rollouts and evaluations, which do not change the weights, at once; an update is finished first.
SIGUSR1 saves a checkpoint at the end of the current step. A signal to one rank counts for all: they vote at the end of rollouts and steps.
The kernel reports each signal to a thread of this module (``set_wakeup_fd``), also while the main thread waits inside a collective; so a
second signal always ends the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

import torch

from grpo.distributed import Interrupted, World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 3.0
"""Ctrl-C reaches a rank twice, from the terminal and from torchrun: signals this close together count as one."""
WARN_AFTER_SECONDS = 10.0
"""A rank that is still running this long after a stop signal prints its phase (torchrun kills it after 30 s)."""
POLL_SECONDS = 0.5


def ignore_save_signal() -> None:
    """Ignore SIGUSR1 until there is something to save: by default it would end the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Signals:
    """Signal handlers, installed from construction until :meth:`close`. Outside the main thread nothing is installed."""

    def __init__(self, world: World, *, ends_process: bool = True):
        """Unless ``ends_process``, a second stop signal raises KeyboardInterrupt in the main thread instead of ending the process."""
        self.world, self.save_requested, self._ends_process = world, False, ends_process
        self._first_stop: float | None = None
        self._first_handled: float | None = None
        self._is_late = self._is_ending = False
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old_handlers = {}
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            # Under nohup SIGHUP stays ignored.
            if number == signal.SIGUSR1 or signal.getsignal(number) is not signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")
        self._thread.start()

    def vote(self) -> tuple[bool, bool]:
        """``(save, stop)`` at a step boundary: True if any rank was asked to. All ranks get the same answer."""
        save, stop = self.world.max(torch.tensor([int(self.save_requested), self.world.stop_signal or 0])).tolist()
        if save:
            self.save_requested = False
        if stop:
            self.world.stop_signal = stop
        return bool(save), bool(stop)

    @property
    def exit_code(self) -> int:
        """128 + signal number, as a shell reports a process that a signal ended; torchrun with ``--max-restarts`` restarts it."""
        return 128 + (self.world.stop_signal or signal.SIGTERM)

    def announce_failure(self, text: str) -> None:
        """This rank ends because of an error."""
        self._is_ending = True

    def close(self) -> None:
        """Restore the handlers that were installed before."""
        if not self._installed:
            return
        self._installed = False
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write)  # ends the thread
        self._thread.join(timeout=5)
        os.close(self._read)

    def _handle(self, number: int, frame: object) -> None:
        """Runs in the main thread, as Python's signal handlers do."""
        if number == signal.SIGUSR1:
            self.save_requested = True
            return
        self.world.stop_signal = self.world.stop_signal or number
        now = time.monotonic()
        self._first_handled = self._first_handled or now
        if not self._ends_process and now - self._first_handled > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        if self.world.may_interrupt:
            self.world.may_interrupt = False
            raise Interrupted

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], POLL_SECONDS)
            if ready:
                numbers = os.read(self._read, 64)
                if not numbers:
                    return
                for number in numbers:
                    if number in STOP_SIGNALS:
                        self._on_stop_signal(number)
            else:
                self._notice_delay()

    def _on_stop_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._first_stop is None:
            self._first_stop, self.world.stop_signal = now, self.world.stop_signal or number
        elif self._ends_process and now - self._first_stop > SAME_SIGNAL_SECONDS:
            self._print(f"second {signal.Signals(number).name}: exiting at once, in phase {self.world.phase!r}")
            os._exit(128 + number)

    def _notice_delay(self) -> None:
        """Say that it takes long to stop."""
        if self._is_late or self._is_ending:
            return
        now = time.monotonic()
        if self._first_stop is not None and now - self._first_stop > WARN_AFTER_SECONDS:
            self._is_late = True
            self._print(f"was asked to stop {WARN_AFTER_SECONDS:g} s ago and is still in phase {self.world.phase!r}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"[rank {self.world.rank}] {text}", file=sys.stderr, flush=True)

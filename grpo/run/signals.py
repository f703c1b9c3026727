"""Signals that ask a run to stop or to save, turned into decisions that all ranks take together.

SIGTERM, SIGINT and SIGHUP stop the run: rollouts and evaluations, which do not change the weights, at once; an update is finished first.
SIGUSR1 saves a checkpoint at the end of the current step. A signal to one rank counts for all: that rank sets a shared flag, the others
read it twice a second, and all vote before anything is done. The kernel reports each signal to a thread of this module
(``set_wakeup_fd``), also while the main thread waits inside a collective; so a second signal always ends the process.

A rank that fails sets the shared flag too. With gloo the others get an error in their next collective. With NCCL they get none, and their
main threads wait in it: then another thread ends the process after ``FAILED_SECONDS``.
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

from grpo.distributed import Interrupted, World, open_shared_flag

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 3.0
"""Ctrl-C reaches a rank twice, from the terminal and from torchrun: signals this close together count as one."""
WARN_AFTER_SECONDS = 10.0
"""A rank that is still running this long after a stop signal prints its phase (torchrun kills it after 30 s)."""
FAILED_SECONDS = 3.0
"""A rank that is still running this long after another one has failed ends."""
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
        self._first_failure: float | None = None
        self._failure = ""
        self._is_late = self._is_ending = False
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return
        self._shared_flag = open_shared_flag(world)
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
        """Tell the other ranks that this one ends because of an error."""
        self._is_ending = True
        flag = self._shared_flag if self._installed else None  # read once: the other thread may set it to None
        if flag is not None:
            with contextlib.suppress(RuntimeError):  # the store's process may have ended
                flag.set_first("failure", text)

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
                self._read_shared_flag()
                self._notice_delay()

    def _on_stop_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._first_stop is None:
            self._first_stop, self.world.stop_signal = now, self.world.stop_signal or number
            with contextlib.suppress(RuntimeError):  # the store's process may have ended
                if self._shared_flag is not None:
                    self._shared_flag.set("stop", str(number))
        elif self._ends_process and now - self._first_stop > SAME_SIGNAL_SECONDS:
            self._print(f"second {signal.Signals(number).name}: exiting at once, in phase {self.world.phase!r}")
            os._exit(128 + number)

    def _read_shared_flag(self) -> None:
        if self._shared_flag is None:
            return
        try:
            number, failure = self._shared_flag.get("stop"), self._shared_flag.get("failure")
        except RuntimeError:  # torchrun has ended, or is ending
            self._shared_flag = None
            return
        if failure is not None and self._first_failure is None:
            self._first_failure, self._failure = time.monotonic(), failure
        if number is not None and self._first_stop is None:  # treat another rank's signal as this rank's own
            signal.pthread_kill(threading.main_thread().ident, int(number))

    def _notice_delay(self) -> None:
        """End this rank if another one has failed, or say that it takes long to stop."""
        if self._is_late or self._is_ending:
            return
        now = time.monotonic()
        if self._first_failure is not None and now - self._first_failure > FAILED_SECONDS:
            self._is_late = True
            self._print(f"{self._failure}; this rank was in phase {self.world.phase!r}, and ends")
            for thread in threading.enumerate():
                if thread.name.startswith("checkpoint"):  # it writes a step that was complete earlier
                    thread.join()
            self.world.exit_now(1)
        elif self._first_stop is not None and now - self._first_stop > WARN_AFTER_SECONDS:
            self._is_late = True
            self._print(f"was asked to stop {WARN_AFTER_SECONDS:g} s ago and is still in phase {self.world.phase!r}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"[rank {self.world.rank}] {text}", file=sys.stderr, flush=True)

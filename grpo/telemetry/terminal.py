"""Standard streams: a reader that goes away stops no run, and what libraries write to stderr appears above the progress bars."""

import contextlib
import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from tqdm import tqdm


def survive_lost_readers() -> None:
    """Let this process go on without a terminal: what is printed to a closed pipe, terminal or stream goes to /dev/null from then on."""
    _wrap_streams(ends_process=False)


def end_without_reader() -> None:
    """Let this process end, quietly and as SIGPIPE would end it (exit code 141), once nobody reads its output (``... | head -1``).

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
        if stream is not getattr(sys, f"__{name}__"):
            continue  # the caller's own stream
        options = dict(line_buffering=True)
        if stream is not None:
            stream.flush()
            is_by_line = stream.line_buffering or stream.write_through or ends_process
            options = dict(encoding=stream.encoding, errors=stream.errors, line_buffering=is_by_line)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(_Output(number, ends_process=ends_process)), **options))


class _Output(io.FileIO):
    """A standard stream that becomes /dev/null when nobody reads it any more; ``SystemExit`` then if that ends the process."""

    def __init__(self, number: int, *, ends_process: bool):
        super().__init__(number, "w", closefd=False)
        self._ends_process = ends_process

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # a closed pipe, a closed terminal
                raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        if self._ends_process:
            sys.exit(128 + signal.SIGPIPE)
        return len(data)


@contextlib.contextmanager
def stderr_above_bars(*, is_main: bool) -> Iterator[None]:
    """Inside this context, whole lines written to ``sys.stderr`` go above the bars that tqdm draws on the real stderr.

    The bars are those of this process if ``is_main``, else those of the main rank on the same terminal.
    """
    stream = sys.stderr
    lines = _LinesAboveBars(stream, is_main=is_main)
    # A logging handler keeps the stream it was created with, so redirecting sys.stderr does not reach it.
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {h for logger in loggers for h in logger.handlers if vars(h).get("stream") is stream}
    with contextlib.redirect_stderr(lines):
        for handler in handlers:
            handler.setStream(lines)
        try:
            yield
        finally:
            for handler in handlers:
                handler.setStream(stream)
            lines.finish()


class _LinesAboveBars:
    """A stand-in for ``stream`` that holds text back until its line is complete."""

    def __init__(self, stream: TextIO, *, is_main: bool):
        self._stream, self._is_main, self._incomplete_line = stream, is_main, ""

    def write(self, text: str) -> int:
        if "\r" in text:  # part of another library's progress bar
            return self._stream.write(text)
        lines, newline, self._incomplete_line = (self._incomplete_line + text).rpartition("\n")
        if newline and self._is_main:
            tqdm.write(lines, file=self._stream)
        elif newline:  # back to the left edge and erase the main rank's bars, which that rank draws again
            self._stream.write(f"\r\x1b[J{lines}\n")
        return len(text)

    def finish(self) -> None:
        """Write a last line that has no line break."""
        if self._incomplete_line:
            self._stream.write(self._incomplete_line + "\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

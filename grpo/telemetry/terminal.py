"""On a terminal, text that libraries and rewards write to stderr appears above the progress bars instead of inside them."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from tqdm import tqdm


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

"""What libraries and rewards print, above the bars of a terminal instead of into them."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from tqdm import tqdm


class AboveBars:
    """Stands where ``sys.stderr`` stands, until :meth:`close`: whole lines go above tqdm's bars, which are drawn on ``stream`` itself.

    Args:
        is_main: whether the bars are this process's own. Over those of another one lines are written from the left; it draws anew.
    """

    def __init__(self, stream: TextIO, *, is_main: bool = True):
        self.stream, self.is_main, self._unfinished = stream, is_main, ""
        sys.stderr = self
        self._handlers = [handler for handler in _handlers() if vars(handler).get("stream") is stream]
        for handler in self._handlers:  # made before, they hold the stream
            handler.setStream(self)

    def write(self, text: str) -> int:
        if "\r" in text:  # another's bar
            return self.stream.write(text)
        whole, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
        if newline and not self.is_main:
            self.stream.write(f"\r\x1b[J{whole}\n")
        elif newline:
            with tqdm.external_write_mode(file=self):
                self.stream.write(whole + newline)
        return len(text)

    def close(self) -> None:
        for handler in self._handlers:
            handler.setStream(self.stream)
        if sys.stderr is self:
            sys.stderr = self.stream
        if self._unfinished:
            self.stream.write(self._unfinished + "\n")
            self._unfinished = ""

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.stream  # tqdm clears bars whose stream equals the one written to

    __hash__ = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _handlers() -> list[logging.Handler]:
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    return list({id(handler): handler for logger in loggers for handler in logger.handlers}.values())

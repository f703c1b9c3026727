"""Lines of long work where no terminal shows a progress bar."""

import sys
import threading

from grpo.system import signs_of_life


class Stream:
    """A stream that ends the wait of a test at its second line."""

    def __init__(self, is_terminal: bool):
        self.is_terminal = is_terminal
        self.text = ""
        self.has_two_lines = threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.text += text
        if self.text.count("\n") == 2:
            self.has_two_lines.set()

    def flush(self) -> None:
        pass


def test_lines_come_until_the_work_ends(monkeypatch):
    stream = Stream(is_terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    before = set(threading.enumerate())
    num_done = iter((12, 24))
    with signs_of_life("evaluation", lambda: f", {next(num_done)}% done", every_s=1):
        (thread,) = set(threading.enumerate()) - before
        assert stream.has_two_lines.wait(timeout=60)
    assert stream.text == "evaluation, 12% done: 1 s so far\nevaluation, 24% done: 2 s so far\n"
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_terminal_and_other_ranks_get_none(monkeypatch):
    for is_terminal, is_shown in ((True, True), (False, False)):
        monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
        before = threading.active_count()
        with signs_of_life("evaluation", is_shown=is_shown, every_s=1):
            assert threading.active_count() == before

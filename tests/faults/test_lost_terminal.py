"""The reader of the output goes away: a closed terminal, a closed pipe, streams that are closed
from the start."""

import os
import pty
import select
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, environment_of_runs
from harness import tiny
from processes import Forked

STEPS = 6
FAILS_LATER = """
import os, time

def fails_later(prompts, completions, **columns):
    while os.path.exists(__file__ + ".wait") and not os.path.exists(__file__ + ".fail"):
        time.sleep(0.02)
    if os.path.exists(__file__ + ".fail"):
        raise RuntimeError("this reward is broken")
    return [float(len(text) % 3) for text in completions]
"""


def read_until(master: int, text: bytes) -> None:
    seen = b""
    while text not in seen:
        assert select.select([master], [], [], 60)[0], seen[-3000:].decode(errors="replace")
        seen += os.read(master, 65536)


@pytest.mark.parametrize("what", ["SIGHUP", "error"])
def test_a_closed_terminal_costs_the_current_step_only(tmp_path, random_model, what):
    """Every write to a closed terminal is an EIO error; what ends the run is a signal, or an error
    that cannot be printed."""
    reward = tmp_path / "later.py"
    output = tmp_path / "run"
    reward.write_text(FAILS_LATER)
    settings = [
        f"reward.functions=['{reward}:fails_later']",
        "eval.before_training=false",
        "data.max_eval_samples=1",
    ]
    master, slave = pty.openpty()
    terminal = os.ttyname(slave)
    environment = environment_of_runs()
    arguments = tiny(random_model, output, *settings)
    started = Forked(
        ROOT / "train_grpo.py",
        arguments,
        ranks=None,
        env=environment,
        stdout=terminal,
        stderr=terminal,
    )
    try:
        read_until(master, b"step 2/")
        (tmp_path / "later.py.wait").touch()
        os.close(slave)
        os.close(master)
        if what == "SIGHUP":
            started.send_signal(signal.SIGHUP)
        else:
            (tmp_path / "later.py.fail").touch()
        assert started.wait(60) == (128 + signal.SIGHUP if what == "SIGHUP" else 1)
    finally:
        started.kill()
    newest = max(int(path.name.split("-")[1]) for path in output.glob("checkpoint-*"))
    assert len((output / "metrics.jsonl").read_text().splitlines()) == newest >= 2


PRINTS = """
import os, sys
from grpo.system import ignore_broken_pipes
ignore_broken_pipes()
with open(sys.argv[1], "w") as file:
    for number in range(3000):
        print("a line of output")
        print("a line of an error", file=sys.stderr)
    file.write(f"{file.fileno()}")
"""


@pytest.mark.parametrize("streams", ["| head -1", "2>&1 | head -1", "<&- >&- 2>&-"])
def test_output_that_nobody_reads_is_no_error(tmp_path, streams):
    """A file opened after the start never gets the number of a standard stream, whose text would
    end in that file."""
    shell = f'{{ "$@"; echo $? > {tmp_path}/code; }} {streams}'
    words = [
        "bash",
        "-c",
        shell,
        "run",
        sys.executable,
        "-c",
        PRINTS,
        str(tmp_path / "file"),
    ]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "code").read_text() == "0\n"
    assert int((tmp_path / "file").read_text()) > 2

"""The reader of the output goes away: a closed terminal, a closed pipe, streams that are closed from the start."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, environment_of_runs
from harness import FAULTY, Started, command, tiny
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
    """Every write to a closed terminal is an EIO error; what ends the run is a signal, or an error that cannot be printed."""
    reward, output = tmp_path / "later.py", tmp_path / "run"
    reward.write_text(FAILS_LATER)
    settings = [f"reward.functions=['{reward}:fails_later']", "eval.before_training=false", "data.max_eval_samples=1"]
    master, slave = pty.openpty()
    terminal, environment = os.ttyname(slave), environment_of_runs()
    arguments = tiny(random_model, output, *settings)
    started = Forked(ROOT / "train_grpo.py", arguments, ranks=None, env=environment, stdout=terminal, stderr=terminal)
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


@pytest.mark.slow
def test_the_terminal_of_torchrun_is_closed(tmp_path, random_model):
    """The kernel sends SIGHUP to the leader of the terminal's session, torchrun, which passes it on to its ranks."""
    output = tmp_path / "run"
    words = command(tiny(random_model, output), ranks=2, torchrun=[], script=FAULTY)
    pid, master = pty.fork()
    if pid == 0:
        os.environ.update(environment_of_runs({"GRPO_FAULT": "rank=1 step=2 place=rollout do=sleep:60"}))
        os.execv(words[0], words)
    started = Started.__new__(Started)
    started.output, started.process = output, Waited(pid)
    read_until(master, b"FAULT")
    os.close(master)
    assert started.end(timeout=60) == 1
    assert (output / "checkpoint-2" / "manifest.json").exists()


class Waited:
    """A process that ``pty.fork`` started, with the part of ``Popen`` that ``Started.end`` uses."""

    def __init__(self, pid: int):
        self.pid = pid

    def wait(self, timeout: float) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


PRINTS = """
import os, sys
from grpo.telemetry.terminal import survive_lost_readers
survive_lost_readers()
with open(sys.argv[1], "w") as file:
    for number in range(3000):
        print("a line of output")
        print("a line of an error", file=sys.stderr)
    file.write(f"{file.fileno()}")
"""


@pytest.mark.parametrize("streams", ["| head -1", "2>&1 | head -1", "<&- >&- 2>&-"])
def test_output_that_nobody_reads_is_no_error(tmp_path, streams):
    """A file opened after the start never gets the number of a standard stream, whose text would end in that file."""
    shell = f'{{ "$@"; echo $? > {tmp_path}/code; }} {streams}'
    words = ["bash", "-c", shell, "run", sys.executable, "-c", PRINTS, str(tmp_path / "file")]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "code").read_text() == "0\n"
    assert int((tmp_path / "file").read_text()) > 2


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("train_grpo.py --help", 0),
        ("-m grpo.evaluation --help", 0),
        ("-m grpo.report --help", 0),
        ("-m grpo.chat --help", 141),
        ("-m grpo.data", 141),
    ],
)
@pytest.mark.slow  # imports take seconds
def test_commands_end_quietly_when_nobody_reads(tmp_path, command, code):
    """Those that only print end as SIGPIPE ends a program, the others finish."""
    shell = f'{{ "$@"; echo $? > {tmp_path}/code; }} | true'
    words = ["bash", "-c", shell, "run", sys.executable, *command.split()]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=60, text=True)
    assert (done.stderr, (tmp_path / "code").read_text()) == ("", f"{code}\n")

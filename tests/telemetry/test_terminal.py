"""What a terminal shows: a bar with numbers, and whatever libraries write above the bar. The terminal here is a pseudo-terminal."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from conftest import ROOT

REPORTER = (
    "import logging, sys, warnings\n"
    "logging.basicConfig(format='%(message)s')\n"  # its handler holds stderr before the reporter exists
    "from grpo.config import Config\n"
    "from grpo.telemetry.reporter import Reporter\n"
    "r = Reporter(Config(output_dir=sys.argv[1]), is_main={is_main}, first_step=0, max_steps=2)\n"
)


def on_a_terminal(command) -> bytes:
    """What a command writes to a pseudo-terminal of 160 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    subprocess.run(command, stdout=slave, stderr=slave, cwd=ROOT, check=True)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal's output
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    return shown


@pytest.mark.slow
def test_the_bar_shows_reward_kl_length_and_speed(tmp_path):
    script = REPORTER.format(is_main=True) + (
        "r.step({'step': 1, 'reward': 0.5, 'kl': 0.25, 'completions/mean_length': 12.0, 'tokens_per_second': 300.0})\n"
        "r.step({'step': 2, 'reward': 0.75})\n"
        "r.close()"
    )
    command = [sys.executable, "-c", script]
    plain = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, text=True, cwd=ROOT, check=True)
    assert plain.stderr == "", "no bar without a terminal"
    assert [line[:24] for line in plain.stdout.splitlines()] == ["step 1/2  reward 0.500  ", "step 2/2  reward 0.750"]
    shown = on_a_terminal([*command, str(tmp_path / "b")])
    assert b"reward=0.500, kl=0.2500, length=12, tokens/s=300" in shown


@pytest.mark.slow
def test_output_of_libraries_appears_in_whole_lines_above_the_bar(tmp_path):
    script = REPORTER.format(is_main=True) + (
        "warnings.warn('a warning')\n"
        "logging.getLogger('library').warning('logged')\n"
        "sys.stderr.write('half '); sys.stderr.write('and half\\n')\n"
        "r.step({'step': 1, 'reward': 0.5})\n"
        "sys.stderr.write('without a line break')\n"
        "r.close(); print('after', file=sys.stderr); logging.error('later')"
    )
    shown = on_a_terminal([sys.executable, "-c", script, str(tmp_path)]).decode()
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1].strip() for line in shown.split("\n")]  # what stays visible
    expected = ["<string>:6: UserWarning: a warning", "logged", "half and half", "step 1/2  reward 0.500", "after", "later"]  # fmt: skip
    assert [line for line in lines if line in expected] == expected, shown
    assert sum("steps:" in line for line in lines) == 1, "the bar once, at the end"
    assert "without a line break" in lines


@pytest.mark.slow
def test_output_of_another_rank_erases_the_bar_first(tmp_path):
    script = REPORTER.format(is_main=False) + (
        "sys.stderr.write('a line of '); sys.stderr.write('rank 1\\n')\nr.close(); print('after', file=sys.stderr)"
    )
    shown = on_a_terminal([sys.executable, "-c", script, str(tmp_path)])
    assert shown == b"\r\x1b[Ja line of rank 1\r\nafter\r\n"

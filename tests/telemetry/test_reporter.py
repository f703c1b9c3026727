"""The reporter: lines on the console, hints, metrics.jsonl and intervals.jsonl, on the main rank only."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from conftest import ROOT

from grpo.config import Config
from grpo.telemetry.records import remove_steps_after
from grpo.telemetry.reporter import Reporter
from grpo.telemetry.terminal import print_user_error


def reporter(folder, *, every=100, **changes):
    config = Config(output_dir=str(folder), logging={"every": every})
    return Reporter(config, **{"is_main": True, "first_step": 0, "max_steps": 9} | changes)


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_that_are_damaged_or_written_again_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": 0.1}\nnot json\n{"step": 1, "x": null}\n{"step": 2}\n{"step": 3, "rew')
    assert remove_steps_after(path, 1) == [{"step": 0, "x": 0.1}, {"step": 1, "x": None}]
    assert path.read_text() == '{"step": 0, "x": 0.1}\n{"step": 1, "x": null}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"], "no temporary file is left"


def test_a_file_that_is_moved_during_the_run_loses_no_step(tmp_path):
    writer = reporter(tmp_path)
    writer.step({"step": 1, "reward": float("nan"), "range": (1.0, float("inf"))})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "old.jsonl")
    writer.sync()
    writer.step({"step": 2, "reward": 0.5})
    writer.close()
    assert steps_in(tmp_path / "old.jsonl") == [1] and steps_in(tmp_path / "metrics.jsonl") == [2]
    line = json.loads((tmp_path / "old.jsonl").read_text())
    assert line == {"step": 1, "reward": None, "range": [1.0, None]}, "JSON has no NaN and no infinity"


@pytest.mark.parametrize(("rewrite_first_step", "kept"), [(False, [0, 1, 2, 3]), (True, [0, 1, 2])])
def test_a_resumed_run_continues_both_files(tmp_path, rewrite_first_step, kept):
    first = reporter(tmp_path)
    for step in range(6):
        first.intervals(step, {"eval/greedy_accuracy": (0.25, 0.5)})
        first.step({"step": step, "reward": 0.5})
    first.close()
    other_rank = reporter(tmp_path, is_main=False)
    other_rank.step({"step": 9})
    other_rank.intervals(9, {})
    other_rank.close()
    second = reporter(tmp_path, first_step=3, rewrite_first_step=rewrite_first_step)
    second.step({"step": kept[-1] + 1, "reward": 9.0})
    second.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [*kept, kept[-1] + 1]
    assert steps_in(tmp_path / "intervals.jsonl") == kept
    reporter(tmp_path, first_step=0).close()
    assert steps_in(tmp_path / "metrics.jsonl") == [], "a new run keeps nothing, also not step 0"


def test_escape_sequences_do_not_reach_the_terminal(tmp_path, capsys):
    writer = reporter(tmp_path)
    writer.print("prompt \x1b]0;title\x07 \x1b[2J\rend\n\tindented")
    print_user_error(ValueError("row 3: \x1b[31mred"))
    shown = capsys.readouterr()
    assert shown.out == "prompt \\u001b]0;title\\u0007 \\u001b[2J\\u000dend\n\tindented\n"
    assert shown.err == "error: row 3: \\u001b[31mred\n"
    writer.close()


def test_the_console_shows_every_nth_step_and_every_evaluation(tmp_path, capsys):
    writer = reporter(tmp_path, every=2, max_steps=5)
    writer.step({"step": 0, "eval/greedy_accuracy": 0.25, "eval/mean_length": 3.0})
    for step in range(1, 6):
        writer.step({"step": step, "reward": 1.0} | ({"eval/greedy_accuracy": 0.5} if step == 3 else {}))
    writer.close()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "eval 0/5  greedy accuracy 25.0%  mean length 3.00"
    assert [line[:8] for line in shown[1:]] == ["step 2/5", "step 3/5", "eval 3/5", "step 4/5", "step 5/5"]


def test_a_hint_is_printed_once_also_over_an_interruption(tmp_path, capsys):
    first = reporter(tmp_path)
    for step in range(1, 13):
        first.step({"step": step, "reward": 0.5, "kl": 2.0})
    first.close()
    assert capsys.readouterr().out.count("hint: the KL to the reference is 2.00 nats") == 1
    second = reporter(tmp_path, first_step=11)
    second.step({"step": 12, "reward": 0.5, "kl": 2.0})
    second.close()
    assert "hint" not in capsys.readouterr().out


SCRIPT = """import sys
from grpo.config import Config
from grpo.telemetry.reporter import Reporter
reporter = Reporter(Config(output_dir=sys.argv[1]), is_main=True, first_step=0, max_steps=2)
reporter.step({'step': 1, 'reward': 0.5, 'kl': 0.25, 'completions/mean_length': 12.0, 'tokens_per_second': 300.0})
reporter.step({'step': 2, 'reward': 0.75})
reporter.close()
"""


@pytest.mark.slow
def test_a_terminal_shows_a_bar_below_the_lines(tmp_path):
    command = [sys.executable, "-c", SCRIPT]
    plain = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, text=True, cwd=ROOT, check=True)
    assert plain.stderr == "", "no bar without a terminal"
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    subprocess.run([*command, str(tmp_path / "b")], stdout=slave, stderr=slave, cwd=ROOT, check=True)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal's output
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    assert b"reward=0.500, kl=0.2500, length=12, tokens/s=300" in shown
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in shown.decode().split("\n")]  # what stays visible
    assert [line[:21] for line in lines[:2]] == ["step 1/2  reward 0.50", "step 2/2  reward 0.75"], lines
    assert sum("steps:" in line for line in lines) == 1, "the bar once, at the end"

"""wandb online, with a local server in place of the real one: it answers well, refuses, does not answer, or dies."""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from wandb_service import service

SCRIPT = """
import sys
from grpo.config import Config
from grpo.telemetry.reporter import Reporter
first, last, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = Config(output_dir=folder, logging={"wandb": "online"})
reporter = Reporter(config, is_main=True, first_step=first, max_steps=last, wandb_run_id="abcd1234")
for step in range(first + 1, last + 1):
    reporter.step({"step": step, "reward": step / 10})
reporter.close()
print("the run goes on")
"""

PARENT = """
import os, subprocess, sys, wandb
wandb.setup()
assert "WANDB_SERVICE" in os.environ
sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[1:]]).returncode)
"""
"""A process that uses wandb itself, and starts the script as a child."""


def report(folder, url: str, first: int, last: int, *, parent: bool = False) -> tuple[str, float]:
    """Report steps ``first`` + 1 to ``last`` in a process of its own; its output, and its seconds."""
    environment = os.environ | {
        "WANDB_BASE_URL": url, "WANDB_API_KEY": "0123456789" * 4, "HOME": str(folder.parent), "WANDB__DISABLE_STATS": "true",
        "WANDB_DISABLE_CODE": "true", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", *([PARENT] if parent else []), SCRIPT, str(first), str(last), str(folder)],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the run goes on" in done.stdout
    return done.stdout, time.monotonic() - started


def steps_written(folder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_server_gets_each_step_once_also_after_an_interruption(tmp_path):
    with service("well") as running:
        output, _ = report(tmp_path / "run", running.url, 0, 3)
        assert "warning" not in output
        assert output.startswith(f"wandb     {running.url}/me/grpo/runs/abcd1234\n")
        assert [(line["_step"], line["step"], line["reward"]) for line in running.lines] == [
            (1, 1, 0.1),
            (2, 2, 0.2),
            (3, 3, 0.3),
        ]
        output, _ = report(
            tmp_path / "run", running.url, 2, 5
        )  # resumed from a checkpoint at step 2: step 3 is sent again
        assert [line["step"] for line in running.lines] == [1, 2, 3, 4, 5]
        assert [line["_step"] for line in running.lines] == [1, 2, 3, 4, 5]
    assert steps_written(tmp_path / "run") == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("parent", [False, True])
def test_a_server_that_refuses_makes_the_run_go_on_offline(tmp_path, parent):
    with service("refuses") as running:
        output, seconds = report(tmp_path / "run", running.url, 0, 2, parent=parent)
    assert "warning: wandb online failed" in output and "going on offline" in output
    assert output.count("warning: ") == 1
    assert seconds < 60
    assert steps_written(tmp_path / "run") == [1, 2]
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*-abcd1234")), "can be sent later"


@pytest.mark.slow
def test_a_server_that_does_not_answer_costs_half_a_minute_once(tmp_path):
    with service("stalls") as running:
        output, seconds = report(tmp_path / "run", running.url, 0, 2)
    assert "going on offline" in output
    assert seconds < 100
    assert steps_written(tmp_path / "run") == [1, 2]


@pytest.mark.slow
def test_a_server_that_dies_costs_one_wait_at_the_end(tmp_path):
    with service("dies") as running:
        output, seconds = report(tmp_path / "run", running.url, 0, 40)
    assert running.lines, "the server answered at first"
    assert steps_written(tmp_path / "run") == list(range(1, 41))
    assert seconds < 150
    assert "step 40/40" in output


@pytest.mark.slow
def test_offline_parts_of_a_run_can_be_sent_later(tmp_path):
    folder = tmp_path / "run"
    with service("refuses") as away:  # both starts go on offline, with the same run id
        report(folder, away.url, 0, 3)
        output, _ = report(folder, away.url, 2, 5)
    printed = shlex.split(output.rpartition("send this run with: ")[2].splitlines()[0])
    assert printed[:2] == ["wandb", "sync"] and len(printed) == 4, "one folder for each start"
    with service("well") as running:
        environment = os.environ | {
            "WANDB_BASE_URL": running.url, "WANDB_API_KEY": "0123456789" * 4, "HOME": str(tmp_path), "no_proxy": "127.0.0.1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", *printed], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line["step"] for line in running.lines] == [1, 2, 3, 4, 5]

"""wandb online, against a local server that stands where the service would be: well, refusing, stalling, dying."""

import json
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from wandb_service import service

SCRIPT = """
import sys
from grpo.telemetry.metrics import Reporter
first, last, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
reporter = Reporter(folder, is_main=True, first_step=first, max_steps=last, wandb_mode="online", wandb_run_id="abcd1234")
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
"""A process that uses wandb itself, and starts ours."""


def report(folder, url: str, first: int, last: int, *, parent: bool = False) -> tuple[str, float]:
    """A reporter's life in a process of its own; what it said, and its seconds."""
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


def test_a_service_that_is_well_gets_each_step_once_also_after_an_interruption(tmp_path):
    with service("well") as running:
        said, _ = report(tmp_path / "run", running.url, 0, 3)
        assert "warning" not in said
        assert [(line["_step"], line["step"], line["reward"]) for line in running.lines] == [
            (1, 1, 0.1),
            (2, 2, 0.2),
            (3, 3, 0.3),
        ]
        said, _ = report(
            tmp_path / "run", running.url, 2, 5
        )  # continued from a checkpoint at step 2: step 3 comes again
        assert [line["step"] for line in running.lines] == [1, 2, 3, 4, 5]
        assert [line["_step"] for line in running.lines] == [1, 2, 3, 4, 5]
    assert steps_written(tmp_path / "run") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("parent", [False, True])
def test_a_service_that_refuses_is_left_alone(tmp_path, parent):
    with service("refuses") as running:
        said, seconds = report(tmp_path / "run", running.url, 0, 2, parent=parent)
    assert "warning: wandb online failed" in said and "going on offline" in said
    assert said.count("warning: ") == 1
    assert seconds < 60
    assert steps_written(tmp_path / "run") == [1, 2]
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*-abcd1234")), "to be sent later"


@pytest.mark.slow
def test_a_service_that_stalls_costs_half_a_minute_once(tmp_path):
    with service("stalls") as running:
        said, seconds = report(tmp_path / "run", running.url, 0, 2)
    assert "going on offline" in said
    assert seconds < 100
    assert steps_written(tmp_path / "run") == [1, 2]


@pytest.mark.slow
def test_a_service_that_dies_costs_a_wait_at_the_end(tmp_path):
    with service("dies") as running:
        said, seconds = report(tmp_path / "run", running.url, 0, 40)
    assert running.lines, "it was well at first"
    assert steps_written(tmp_path / "run") == list(range(1, 41))
    assert seconds < 150
    assert "step 40/40" in said


@pytest.mark.slow
def test_offline_parts_of_a_run_can_be_sent_later(tmp_path):
    folder = tmp_path / "run"
    with service("refuses") as away:  # online goes on offline, with the run's id
        report(folder, away.url, 0, 3)
        report(folder, away.url, 2, 5)
    parts = sorted((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_ctime)
    assert len(parts) == 2
    with service("well") as running:
        environment = os.environ | {
            "WANDB_BASE_URL": running.url, "WANDB_API_KEY": "0123456789" * 4, "HOME": str(tmp_path), "no_proxy": "127.0.0.1",
        }  # fmt: skip
        for part in parts:
            command = [sys.executable, "-m", "wandb", "sync", str(part)]
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        assert [line["step"] for line in running.lines] == [1, 2, 3, 4, 5]

"""wandb online, with a local server in place of the real one (one that fails:
``tests/faults/test_wandb.py``)."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from wandb_service import service

SCRIPT = """
import sys
from grpo.config import Config
from grpo.telemetry.reporter import Reporter
first, last, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = Config(output_dir=folder, logging={"wandb": "online"})
reporter = Reporter(config, is_main=True, first_step=first, max_steps=last, newest_line=None, wandb_run_id="abcd1234")
for step in range(first + 1, last + 1):
    reporter.step({"step": step, "reward": step / 10})
reporter.close()
print("the run goes on")
"""


def report(folder, url: str, first: int, last: int) -> str:
    """Report steps ``first`` + 1 to ``last`` in a process of its own; its output."""
    environment = os.environ | {
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "0123456789" * 4,
        "HOME": str(folder.parent),
        "WANDB__DISABLE_STATS": "true",
        "WANDB_DISABLE_CODE": "true",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-c", SCRIPT, str(first), str(last), str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=200
    )
    assert "the run goes on" in done.stdout, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_server_gets_each_step_once_also_after_an_interruption(tmp_path):
    with service("well") as running:
        output = report(tmp_path / "run", running.url, 0, 3)
        assert (
            output.startswith(f"wandb     {running.url}/me/grpo/runs/abcd1234\n")
            and "warning" not in output
        )
        assert [(line["_step"], line["step"], line["reward"]) for line in running.lines] == [
            (1, 1, 0.1), (2, 2, 0.2), (3, 3, 0.3),
        ]  # fmt: skip
        # resumed from a checkpoint at step 2: step 3 is sent again
        report(tmp_path / "run", running.url, 2, 5)
        assert [line["step"] for line in running.lines] == [1, 2, 3, 4, 5]
        assert [line["_step"] for line in running.lines] == [1, 2, 3, 4, 5]
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [1, 2, 3, 4, 5]

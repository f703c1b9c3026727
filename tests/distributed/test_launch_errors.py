"""``launch.sh`` with several processes: what it prints when one of them has an error."""

import subprocess
import sys

import pytest
from conftest import ROOT, environment_of_runs

MESSAGE = "rollout.prompts_per_step=7 is not a multiple of 2 processes: use 1 processes, or "


@pytest.mark.slow
def test_launch_sh_starts_processes_and_prints_an_error_of_the_user(tmp_path):
    settings = {"GRPO_NO_SETUP": "1", "PYTHON": sys.executable, "NPROC_PER_NODE": "2"}
    wrong = ["rollout.prompts_per_step=7", f"output_dir={tmp_path}/run", "runtime.device=cpu"]
    done = subprocess.run(
        [str(ROOT / "launch.sh"), "configs/tiny_arithmetic.yaml", *wrong],
        cwd=ROOT, env=environment_of_runs(settings), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and f"error: {MESSAGE}" in done.stderr

"""``launch.sh`` and torchrun: the number of ranks, and what is printed last after an error."""

import subprocess
import sys

import pytest
from conftest import ROOT, environment_of_runs, small_run

pytestmark = pytest.mark.slow
MESSAGE = "rollout.prompts_per_step=7 is not a multiple of 2 ranks: use --nproc_per_node=1, or "
MESSAGE += "rollout.prompts_per_step=6 or 8"


def launched(*command: str, **env: str) -> subprocess.CompletedProcess:
    env = environment_of_runs({"GRPO_NO_SETUP": "1", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "0,1,2,3"} | env)
    env.pop("OMP_NUM_THREADS")
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_launch_sh_prints_an_error_of_the_user_alone(tmp_path):
    wrong = ["rollout.prompts_per_step=7", f"output_dir={tmp_path}/run", "runtime.device=cpu"]
    done = launched(str(ROOT / "launch.sh"), "configs/tiny_arithmetic.yaml", *wrong, NPROC_PER_NODE="2")
    assert (done.returncode, done.stderr) == (1, f"error: {MESSAGE}\n")


def test_the_table_of_torchrun_ends_with_the_error(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_grpo.py"]
    done = launched(*launcher, "rollout.prompts_per_step=7", f"output_dir={tmp_path}/run", "runtime.device=cpu")
    *_, last, _, empty = done.stderr.split("\n")
    assert (done.returncode, last.strip(), empty) == (1, f"traceback : {MESSAGE}", "")


def test_launch_sh_names_a_rank_that_fails_otherwise(tmp_path, random_model):
    broken = f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:raises']"
    arguments = [*small_run(random_model, tmp_path / "run"), broken, "runtime.device=cpu"]
    done = launched(str(ROOT / "launch.sh"), *arguments, NPROC_PER_NODE="2")
    *_, error, note = [line for line in done.stderr.splitlines() if "error: [rank" in line or "exitcode" in line]
    assert done.returncode == 1 and error.startswith("error: [rank ") and "failed (exitcode: 1) local_rank: " in note
    assert done.stderr.splitlines()[-1] == note


@pytest.mark.parametrize(("prompts", "ranks"), [(6, 3), (1, 1)])
def test_launch_sh_starts_as_many_ranks_as_share_a_step(tmp_path, random_model, prompts, ranks):
    """With 4 GPUs, which the ranks leave alone."""
    more = [f"rollout.prompts_per_step={prompts}", "runtime.device=cpu", "optim.max_steps=1"]
    done = launched(str(ROOT / "launch.sh"), *small_run(random_model, tmp_path / "run"), *more)
    note = f"note: using {ranks} of 4 GPUs, because rollout.prompts_per_step={prompts} is not a multiple of 4; "
    assert note in done.stderr and f"over {ranks} rank(s)" in done.stdout

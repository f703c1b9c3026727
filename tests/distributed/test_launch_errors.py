"""After an error, what the launchers of several ranks print last is that error."""

import subprocess
import sys

import pytest
from conftest import ROOT, environment_of_runs, small_run
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from grpo.distributed import torchrun

MESSAGE = "rollout.prompts_per_step=7 is not a multiple of 2 ranks: use --nproc_per_node=1, or rollout.prompts_per_step=6 or 8"


def launched(tmp_path, *command: str) -> subprocess.CompletedProcess:
    """Two ranks with a number of problems that cannot be shared between them."""
    env = environment_of_runs({"GRPO_NO_SETUP": "1", "PYTHON": sys.executable, "NPROC_PER_NODE": "2"})
    env.pop("OMP_NUM_THREADS")
    words = [*command, "rollout.prompts_per_step=7", f"output_dir={tmp_path}/run"]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_launch_sh_prints_the_error_alone(tmp_path):
    done = launched(tmp_path, str(ROOT / "launch.sh"), "configs/tiny_arithmetic.yaml")
    assert (done.returncode, done.stderr) == (1, f"error: {MESSAGE}\n")


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "ranks"), [(6, 3), (1, 1)])
def test_launch_sh_starts_as_many_ranks_as_share_a_step(tmp_path, random_model, prompts, ranks):
    """On a machine whose ``nvidia-smi`` lists 4 GPUs; the ranks run on the CPU."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i; done\n")
    program.chmod(0o755)
    env = environment_of_runs({"GRPO_NO_SETUP": "1", "PYTHON": sys.executable})
    env["PATH"] = f"{program.parent}:{env['PATH']}"
    env.pop("CUDA_VISIBLE_DEVICES", None)
    more = [f"rollout.prompts_per_step={prompts}", "runtime.device=cpu", "optim.max_steps=1"]
    command = [str(ROOT / "launch.sh"), *small_run(random_model, tmp_path / "run"), *more]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True)
    note = f"note: using {ranks} of 4 GPUs, because rollout.prompts_per_step={prompts} is not a multiple of 4; "
    assert note in done.stderr and f"over {ranks} rank(s)" in done.stdout


@pytest.mark.slow
def test_the_table_of_torchrun_ends_with_the_error(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_grpo.py"]
    done = launched(tmp_path, *launcher)
    *_, last, _, empty = done.stderr.split("\n")
    assert (done.returncode, last.strip(), empty) == (1, f"traceback : {MESSAGE}", "")


def test_a_rank_that_was_killed_is_named():
    assert torchrun._ending(ProcessFailure(0, 12, 1, "")) == "(process 12) ended with exit code 1"
    killed = torchrun._ending(ProcessFailure(0, 12, -9, ""))
    assert killed == "(process 12) was ended by SIGKILL: the machine may be out of memory"

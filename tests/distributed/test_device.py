"""GPUs that the installed PyTorch cannot use stop the run; they must not turn into CPU ranks, one for each GPU."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment_of_runs, small_run

from grpo.config import RuntimeConfig
from grpo.distributed import device as module
from grpo.distributed import start_world

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch can use the GPUs of this machine")


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """``nvidia-smi`` of a machine with two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_build_without_cuda_is_refused(two_gpus):
    with pytest.raises(ValueError, match="this machine has 2 NVIDIA GPU") as refused:
        start_world(RuntimeConfig())
    assert "built without CUDA; install a build for CUDA (https://" in str(refused.value)
    assert "runtime.device=cpu trains on the CPU" in str(refused.value)


def test_the_cpu_can_be_asked_for(two_gpus, monkeypatch):
    assert start_world(RuntimeConfig(device="cpu")).device.type == "cpu"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert start_world(RuntimeConfig()).device.type == "cpu"


def test_a_driver_that_is_too_old_is_named(two_gpus, monkeypatch):
    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.\nMore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(ValueError, match=r"driver on your system is too old \(found version 11040\)") as refused:
        start_world(RuntimeConfig())
    assert "is built for CUDA 13.0: install a driver that is new enough" in str(refused.value)


def test_no_gpu_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "Path", lambda folder: tmp_path)
    assert start_world(RuntimeConfig()).device.type == "cpu"


@pytest.mark.slow
def test_launch_sh_starts_no_cpu_ranks(two_gpus, tmp_path, random_model):
    env = environment_of_runs({"GRPO_NO_SETUP": "1", "PYTHON": sys.executable})
    command = [str(ROOT / "launch.sh"), "configs/tiny_arithmetic.yaml", *small_run(random_model, tmp_path / "run")[1:]]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and not (tmp_path / "run").exists()
    (line,) = {line for line in done.stderr.splitlines() if line.startswith("error: ")}  # a slow rank prints it too
    assert line.startswith("error: this machine has 2 NVIDIA GPU(s), but PyTorch cannot use them: ")

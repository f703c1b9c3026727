"""Two torchrun agents that find one another, as on two machines, make the run of two ranks of one
agent."""

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_trainer, small_run
from safetensors.torch import load_file, save_file


@pytest.mark.slow
def test_two_agents_on_loopback(tmp_path, random_model):
    """The command of docs/multi_gpu.md, twice; the second machine comes later."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents, threads = (
        [],
        ["runtime.threads_per_rank=1", "runtime.timeout_s=120", "optim.max_steps=3"],
    )
    for node in ("0", "1"):
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            f"--node_rank={node}",
        ]
        launcher += ["--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
        command = [*launcher, "train_grpo.py", *small_run(random_model, tmp_path / "two"), *threads]
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        agents.append(
            subprocess.Popen(
                command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, **streams
            )
        )
        time.sleep(1.0)
    said = [agent.communicate(timeout=280)[0] for agent in agents]
    for agent, text in zip(agents, said, strict=True):
        assert agent.returncode == 0, text[-3000:]
    run_trainer(*small_run(random_model, tmp_path / "one"), "optim.max_steps=3", ranks=2)
    expected, found = (
        load_file(tmp_path / name / "checkpoint-3" / "model.safetensors") for name in ("one", "two")
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "step 3/3" in said[0] and "2 rank(s)" in said[0]
    assert "step 3/3" not in said[1], "only the first machine prints progress"


@pytest.mark.slow
def test_ranks_whose_models_differ_do_not_train(tmp_path, random_model):
    """Each machine has its own folders; one weight is not the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in range(2):
        own = tmp_path / f"machine-{rank}"
        shutil.copytree(random_model, own / "model")
        if rank == 1:
            weights = load_file(own / "model" / "model.safetensors")
            next(iter(weights.values())).view(-1)[0] += 1
            save_file(weights, own / "model" / "model.safetensors", metadata={"format": "pt"})
        launch = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_PORT": str(port),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "train_grpo.py",
            *small_run(own / "model", own / "run"),
            "runtime.timeout_s=120",
        ]
        ranks.append(
            subprocess.Popen(
                command,
                env=os.environ | launch,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    (error,) = [line for line in said[0].splitlines() if line.startswith("error: ")]
    assert "model.name_or_path" in error
    assert "on rank 0" in error and "on rank 1: all ranks need the same" in error
    assert not (tmp_path / "machine-0" / "run" / "metrics.jsonl").exists()

"""Two torchrun agents that find one another, as on two machines, make the run of two ranks of one agent."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_trainer, small_run
from safetensors.torch import load_file


@pytest.mark.slow
def test_two_agents_on_loopback(tmp_path, random_model):
    """The command of docs/multi_gpu.md, twice; the second machine comes later."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents, threads = [], ["runtime.threads_per_rank=1", "runtime.timeout_s=120", "optim.max_steps=3"]
    for node in ("0", "1"):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={node}"]
        launcher += ["--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
        command = [*launcher, "train_grpo.py", *small_run(random_model, tmp_path / "two"), *threads]
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        agents.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, **streams))
        time.sleep(1.0)
    said = [agent.communicate(timeout=280)[0] for agent in agents]
    for agent, text in zip(agents, said, strict=True):
        assert agent.returncode == 0, text[-3000:]
    run_trainer(*small_run(random_model, tmp_path / "one"), "optim.max_steps=3", ranks=2)
    expected, found = (load_file(tmp_path / name / "checkpoint-3" / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "step 3/3" in said[0] and "over 2 rank(s)" in said[0]
    assert "step 3/3" not in said[1], "only the first machine prints progress"

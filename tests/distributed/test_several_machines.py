"""Two torchrun agents that find one another by rendezvous, as on two machines, make the run that two ranks of one agent make."""

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_trainer, small_run
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch_on_two(arguments, address: str, prefixes, extra: dict | None = None) -> list[subprocess.CompletedProcess]:
    """``./launch.sh`` twice, by the variables of the README, each behind its own command prefix."""
    port = str(free_port())
    agents = []
    for node, prefix in enumerate(prefixes):
        environment = os.environ | {
            "NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": address, "MASTER_PORT": port, "NPROC_PER_NODE": "1",
            "GRPO_NO_SETUP": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **(extra or {}),
        }  # fmt: skip
        command = [*prefix, str(ROOT / "launch.sh"), *arguments, "runtime.threads_per_rank=1", "runtime.timeout_s=120"]
        agents.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
            )
        )
        time.sleep(1.0)  # the second machine may come later
    said = [agent.communicate(timeout=280)[0] for agent in agents]
    for agent, text in zip(agents, said, strict=True):
        assert agent.returncode == 0, text[-3000:]
    return said


def assert_is_the_run_of_two_ranks(folder, model, said):
    run_trainer(*small_run(model, folder / "one"), "optim.max_steps=3", ranks=2)
    expected, found = (load_file(folder / name / "checkpoint-3" / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "step 3/3" in said[0] and "over 2 rank(s)" in said[0]
    assert "step 3/3" not in said[1], "the first machine alone speaks"


def test_two_agents_on_loopback(tmp_path, random_model):
    arguments = ["configs/tiny_arithmetic.yaml", *small_run(random_model, tmp_path / "two"), "optim.max_steps=3"]
    base = ["algorithm.beta=0.04", "eval.num_samples=1", "eval.temperature=0", "optim.lr_scheduler_type=constant"]
    said = launch_on_two([*arguments, *base], "127.0.0.1", [[], []])
    assert_is_the_run_of_two_ranks(tmp_path, random_model, said)


@pytest.fixture
def two_namespaces():
    """Two network namespaces joined by a cable: the nearest thing to two machines that one machine has."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"grpo{os.getpid()}{side}" for side in "ab"]

    def run(*words):
        return subprocess.run([ip, *words], capture_output=True, text=True, check=False)

    try:
        if any(run("netns", "add", name).returncode for name in names):
            pytest.skip("this system allows no network namespaces")
        run("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable0", "netns", names[1])
        for number, name in enumerate(names, 1):
            run("-n", name, "addr", "add", f"10.199.0.{number}/24", "dev", "cable0")
            for device in ("lo", "cable0"):
                up = run("-n", name, "link", "set", device, "up")
                if up.returncode:
                    pytest.skip(f"no network between namespaces here: {up.stderr.strip()}")
        yield [[ip, "netns", "exec", name] for name in names]
    finally:
        for name in names:
            run("netns", "del", name)


def test_two_agents_in_two_network_namespaces(tmp_path, random_model, two_namespaces):
    arguments = ["configs/tiny_arithmetic.yaml", *small_run(random_model, tmp_path / "two"), "optim.max_steps=3"]
    base = ["algorithm.beta=0.04", "eval.num_samples=1", "eval.temperature=0", "optim.lr_scheduler_type=constant"]
    said = launch_on_two([*arguments, *base], "10.199.0.1", two_namespaces, {"GLOO_SOCKET_IFNAME": "cable0"})
    assert_is_the_run_of_two_ranks(tmp_path, random_model, said)

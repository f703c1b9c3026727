"""FSDP with the vLLM engine: the ranks gather the weights for the server, and compute its probe
together."""

import pytest
import torch
from conftest import run_trainer, small_run
from faulty_vllm import FaultyServer
from outputs import weights

pytestmark = pytest.mark.slow


def test_a_sharded_model_is_synced_whole(tmp_path, random_model):
    server, folder = FaultyServer(random_model), tmp_path / "weights"
    start = server.model.model.norm.weight.detach().clone()
    folder.mkdir()
    options = [
        "runtime.parallel=fsdp",
        "optim.learning_rate=1e-2",
        "optim.max_steps=2",
        "eval.before_training=false",
    ]
    options += [
        "rollout.engine=vllm",
        f"rollout.server={server.address}",
        f"rollout.weights_folder={folder}",
    ]
    try:
        run_trainer(
            *small_run(random_model, tmp_path / "run"), *options, "runtime.timeout_s=180", ranks=2
        )
    finally:
        server.stop()
    given, expected = server.model.state_dict(), weights(tmp_path / "run" / "checkpoint-2")
    assert given.keys() == expected.keys()  # the last evaluation is of the last weights
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(given["model.norm.weight"], start)
    assert (
        len(server.bodies) == 2 * 24 + 13 and server.num_loads == 3 and list(folder.iterdir()) == []
    )

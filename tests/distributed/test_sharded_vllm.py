"""FSDP with the vLLM engine: the ranks gather the weights for the server, and compute its probe together."""

import pytest
import torch
from conftest import ROOT, environment_of_runs, run_forked, small_run
from faulty_vllm import FaultyServer

pytestmark = pytest.mark.slow


def test_a_sharded_model_is_synced_whole(tmp_path, random_model):
    server, file, folder = FaultyServer(random_model), tmp_path / "facts.pt", tmp_path / "weights"
    start = server.model.model.norm.weight.detach().clone()
    folder.mkdir()
    arguments = [*small_run(random_model, tmp_path / "run"), "runtime.parallel=fsdp", "optim.learning_rate=1e-2"]
    arguments += [f"rollout.weights_folder={folder}", "runtime.timeout_s=180"]
    try:
        script = ROOT / "tests" / "distributed" / "sharded_vllm.py"
        done = run_forked(script, [file, server.address, *arguments], ranks=2, timeout=300, env=environment_of_runs())
        assert done.returncode == 0, done.stderr[-3000:]
        facts, given = torch.load(file), server.model.state_dict()
        assert facts["weights"].keys() == dict(server.model.named_parameters()).keys()
        assert all(torch.equal(given[name], tensor) for name, tensor in facts["weights"].items())
        assert not torch.equal(given["model.norm.weight"], start)
    finally:
        server.stop()
    assert [len(ids) for ids in facts["ids"]] == [24, 24]  # of two steps with 6 problems of 4 completions
    assert server.num_loads == 2 and list(folder.iterdir()) == []

"""``GRPO_TEST_COLLECTIVES=1``: one rank that communicates as several do, and computes what it
computes alone."""

import socket

import pytest
import torch
import torch.distributed as dist
from conftest import small_run
from torch.nn.parallel import DistributedDataParallel

import train_grpo
from grpo.config import load_config
from grpo.distributed import gradient_sync, start_world
from grpo.model import decoder_layers
from grpo.run import optimizer
from grpo.run.memory import try_largest_step
from grpo.run.prepare import prepare


def variables() -> dict[str, str]:
    """Of torchrun, for one rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GRPO_TEST_COLLECTIVES": "1"} | ranks


def test_gradients_stay_in_the_buckets(tmp_path, random_model, monkeypatch):
    """Through micro-batches that do not synchronise, one that does, and the optimizer's update."""
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    arguments = [
        *small_run(random_model, tmp_path / "run"),
        "optim.tokens_per_microbatch=60",
        "optim.max_steps=1",
    ]
    config = load_config([*arguments, "eval.before_training=false", "data.max_eval_samples=1"])
    run = prepare(config, start_world(config.runtime))
    parameters, seen = list(run.learner.policy.model.parameters()), {}

    def storages() -> list[int]:
        return [p.grad.untyped_storage().data_ptr() for p in parameters]

    def watched(module, *, enabled):
        seen.setdefault("sync" if enabled else "no sync", storages())
        return gradient_sync(module, enabled=enabled)

    def before_the_update(learner, metrics):
        seen["summed"] = storages()
        assert any(p.grad.any() for p in parameters)
        optimizer.apply_update(learner, metrics)

    monkeypatch.setattr(train_grpo, "gradient_sync", watched)
    monkeypatch.setattr(train_grpo, "apply_update", before_the_update)
    try:
        assert (
            isinstance(run.learner.scorer, DistributedDataParallel) and dist.get_backend() == "gloo"
        )
        buckets = storages()
        assert not any(p.grad.any() for p in parameters)
        train_grpo.train(run)
        seen["after the update"] = storages()
        assert not any(p.grad.any() for p in parameters)
    finally:
        run.close()
        run.world.shutdown()
    assert seen == dict.fromkeys(["no sync", "sync", "summed", "after the update"], buckets)


def test_a_sharded_pass_that_does_not_fit_is_refused(tmp_path, random_model, monkeypatch):
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    arguments = [
        *small_run(random_model, tmp_path / "run"),
        "runtime.parallel=fsdp",
        "rollout.prompts_per_step=2",
    ]
    config = load_config(arguments)
    run = prepare(config, start_world(config.runtime))
    last_layer = decoder_layers(run.learner.policy.model)[-1]
    last_layer.register_forward_hook(lambda *_: torch.empty(1 << 50, dtype=torch.uint8))
    try:
        with pytest.raises(
            ValueError, match=r"optim\.tokens_per_microbatch=16384 is too much .*: try 8192"
        ):
            try_largest_step(run, run.tasks.eval_problems)
    finally:
        run.close()
        run.world.shutdown()

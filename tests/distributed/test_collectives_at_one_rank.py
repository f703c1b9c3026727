"""``GRPO_TEST_COLLECTIVES=1``: one rank that communicates as several do, through DDP and collectives, and computes what it computes alone."""

import json
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, environment_of_runs, run_trainer, small_run
from torch.nn.parallel import DistributedDataParallel

import train_grpo
from grpo.config import load_config
from grpo.distributed import gradient_sync, start_world
from grpo.run import optimizer
from grpo.run.prepare import prepare


@contextmanager
def run_of_one_rank(monkeypatch, arguments):
    """A run that is prepared in this process, as a rank of torchrun that keeps its collectives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in (address | {"GRPO_TEST_COLLECTIVES": "1"}).items():
        monkeypatch.setenv(name, value)
    config = load_config(arguments)
    world = start_world(config.runtime)
    run = prepare(config, world)
    try:
        yield run
    finally:
        run.close()
        world.shutdown()


def storages(run) -> list[int]:
    return [p.grad.untyped_storage().data_ptr() for p in run.policy.model.parameters() if p.grad is not None]


def test_gradients_stay_in_the_buckets(tmp_path, random_model, monkeypatch):
    """Through micro-batches that do not synchronise, one that does, and the optimizer's update."""
    arguments = [*small_run(random_model, tmp_path / "run"), "optim.tokens_per_microbatch=60", "optim.max_steps=1"]
    seen = {}
    with run_of_one_rank(monkeypatch, [*arguments, "eval.before_training=false", "data.max_eval_samples=1"]) as run:
        assert isinstance(run.scorer, DistributedDataParallel) and dist.get_backend() == "gloo"
        buckets = storages(run)
        assert len(buckets) == len(list(run.policy.model.parameters())) and not any(
            p.grad.any() for p in run.policy.model.parameters()
        )

        def watched(module, *, enabled):
            seen.setdefault("sync" if enabled else "no sync", storages(run))
            return gradient_sync(module, enabled=enabled)

        def before_the_update(run, metrics):
            seen["summed"] = storages(run)
            assert any(p.grad.any() for p in run.policy.model.parameters())
            optimizer.apply_update(run, metrics)

        monkeypatch.setattr(train_grpo, "gradient_sync", watched)
        monkeypatch.setattr(train_grpo, "apply_update", before_the_update)
        train_grpo.train(run)
        seen["after the update"] = storages(run)
        assert not any(p.grad.any() for p in run.policy.model.parameters())
    assert set(seen) == {"sync", "no sync", "summed", "after the update"}
    assert all(addresses == buckets for addresses in seen.values()), seen


def test_collectives_are_called(tmp_path, random_model, monkeypatch):
    calls = []
    for name in ("all_reduce", "all_gather", "all_gather_object"):
        real = getattr(dist, name)
        monkeypatch.setattr(
            dist, name, lambda *args, name=name, real=real, **kw: (calls.append(name), real(*args, **kw))[1]
        )
    with run_of_one_rank(monkeypatch, small_run(random_model, tmp_path / "run")) as run:
        world, rows = run.world, torch.arange(6.0)
        calls.clear()
        assert not world.is_alone and world.size == 1
        assert torch.equal(world.sum(rows), rows) and torch.equal(world.gather_rows(rows), rows)
        assert world.gather_objects("x") == ["x"]
        assert calls == ["all_reduce", "all_gather", "all_gather_object"]


@pytest.mark.slow
def test_the_run_is_that_of_a_rank_alone(tmp_path, random_model):
    """Under torchrun with one process: the same metrics and the same weights, to the bit."""
    arguments = [*small_run(random_model, tmp_path / "alone"), "algorithm.beta=0.05", "optim.tokens_per_microbatch=60"]
    run_trainer(*arguments)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "train_grpo.py"]
    env = environment_of_runs({"GRPO_TEST_COLLECTIVES": "1"})
    done = subprocess.run(
        [*command, *arguments, f"output_dir={tmp_path}/kept"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = []
    for output in (tmp_path / "alone", tmp_path / "kept"):
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        files = json.loads((output / "checkpoint-5" / "manifest.json").read_text())["files"]
        volatile = ("step_time", "tokens_per_second", "time/")
        results.append(
            ([{k: v for k, v in row.items() if not k.startswith(volatile)} for row in rows], files["model.safetensors"])
        )
    assert results[0] == results[1]

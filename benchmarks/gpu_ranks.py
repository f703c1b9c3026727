"""Checks of ``gpu.py`` that start the trainer as ranks: NCCL with a single one, two on one GPU."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from unittest.mock import patch

import torch.distributed as dist
from gpu_common import Bench, Found, NotRun, check, expect
from gpu_runs import MISSING, lines_of, results_of, start, whole_run
from torch.nn.parallel import DistributedDataParallel

if not MISSING:
    import train_grpo
    from grpo.distributed import launch

COLLECTIVES = {"GRPO_TEST_COLLECTIVES": "1"}
"""The switch that keeps collectives and DDP with a single rank."""


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank."""
    values = dict(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_PORT=port, MASTER_ADDR="127.0.0.1"
    )
    return {name: str(value) for name, value in values.items()}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def counted(arguments: list[str]) -> int:
    """The trainer; prints how often it summed over ranks, and passed through DDP."""
    calls, all_reduce, forward = Counter(), dist.all_reduce, DistributedDataParallel.forward

    def counting(tensor, *more, **options):
        calls[f"all-reduces by {dist.get_backend()} on {tensor.device.type}"] += 1
        return all_reduce(tensor, *more, **options)

    def passing(ddp, *more, **options):
        calls["DDP"] += 1
        return forward(ddp, *more, **options)

    with patch.object(dist, "all_reduce", counting), patch.object(DistributedDataParallel, "forward", passing):
        code = train_grpo.main(arguments)
    print("counted", json.dumps(calls))
    return code


@check(120)
def nccl_alone(bench: Bench) -> Found:
    """one rank with NCCL and DDP, their shortcuts off, has the bits of a run without"""
    if bench.is_emulated:
        raise NotRun("not on an emulated device: it has no NCCL")
    whole = whole_run(bench)
    text = start(bench, "nccl", main=counted, env=rank_environment(0, 1, free_port()) | COLLECTIVES).complete()
    calls = json.loads(re.search(r"^counted (.*)$", text, re.M)[1])
    sums = calls.get(f"all-reduces by {'nccl on cuda' if bench.device.type == 'cuda' else 'gloo on cpu'}", 0)
    expect(sums > 0 and calls.get("DDP", 0) > 0, f"NCCL or DDP took no part: {calls}")
    (expected, digests), (found, found_digests) = results_of(whole), results_of(bench.scratch / "nccl")
    unequal = [row["step"] for row, other in zip(expected, found, strict=True) if row != other]
    expect(not unequal and digests == found_digests, f"steps {unequal} differ, or the weights at the end")
    return calls


def by_gloo(arguments: list[str]) -> int:
    """The trainer as one of several ranks that share the first GPU, which NCCL refuses."""
    init, choose = dist.init_process_group, launch.choose_device

    def init_gloo(backend, **options):
        return init("gloo", **options | {"device_id": None})

    def choose_first(wanted, local_rank, local_size):
        return choose(wanted, 0, 1)

    with patch.object(dist, "init_process_group", init_gloo), patch.object(launch, "choose_device", choose_first):
        return counted(arguments)


@check(120)
def gloo_two_ranks(bench: Bench) -> Found:
    """two ranks on one GPU (gloo) take the first step that one rank takes: the same completions, loss and gradient to 1e-3"""
    if bench.is_emulated:
        raise NotRun("not on an emulated device: gloo cannot read its memory")
    settings = ("runtime.precision=fp32", "runtime.deterministic=false", "optim.max_steps=1")
    start(bench, "one", *settings).complete()
    port = free_port()
    settings += (f"output_dir={bench.scratch}/two",)
    ranks = [start(bench, f"two-{r}", *settings, main=by_gloo, env=rank_environment(r, 2, port)) for r in range(2)]
    texts = [rank.complete() for rank in ranks]
    calls = json.loads(re.search(r"^counted (.*)$", texts[0], re.M)[1])
    expect(calls.get(f"all-reduces by gloo on {bench.device.type}", 0) > 0, f"gloo took no part: {calls}")
    (one,), (two,) = (lines_of(bench.scratch / name) for name in ("one", "two"))
    for name in ("reward", "completions/mean_length", "num_tokens", "loss", "kl", "grad_norm"):
        expect(
            abs(one[name] - two[name]) <= 1e-3 * abs(one[name]) + 1e-6,
            f"{name} is {two[name]} with two ranks, {one[name]} with one",
        )
    return calls | {"grad_norm": two["grad_norm"]}

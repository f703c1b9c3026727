"""Builds the engine that ``rollout.engine`` names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from grpo.config import Config, ConfigError
from grpo.distributed import World
from grpo.hub import snapshot_of
from grpo.model import Policy, base_of
from grpo.rollout import BuiltinEngine, Engine, SamplingParams
from grpo.system import import_extra


def build_engine(
    config: Config,
    world: World,
    policy: Policy,
    *,
    path: str,
    root: nn.Module,
    uses: Sequence[tuple[int, SamplingParams]],
    probe_ids: Sequence[int],
    folder: str | Path,
    builtin: dict[str, Any],
) -> Engine:
    """The engine of a run, an evaluation or a chat. All ranks call it together.

    Args:
        policy: under FSDP its model is sharded.
        path: folder or Hub id of the model; of an adapter's folder, servers start with its model.
        root: the module that holds the policy's model, under FSDP the sharded one.
        uses: for each kind of sampling to come, the tokens of its longest prompt and its settings; empty: not known.
        probe_ids: a prompt, for the proof that a server has the weights it was given.
        folder: gets the logs of servers.
        builtin: arguments of :class:`BuiltinEngine`; its policy replaces the other one, under FSDP by the copy that
            samples.

    Raises:
        ValueError: on all ranks, if a server cannot be started, or is not fit for this run.
    """
    if config.rollout.engine == "builtin":
        return BuiltinEngine(**{"policy": policy} | builtin)
    for package in ("httpx", "anyio"):
        import_extra(package, "vllm", "rollout.engine=vllm")
    from grpo.vllm.client import Server
    from grpo.vllm.engine import VLLMEngine

    settings, started = config.rollout, []
    with contextlib.ExitStack() as on_failure:
        with world.fail_together():
            if world.is_main and settings.addresses is None:
                started = _start(config, world, policy, path, uses, Path(folder), on_failure)
        addresses = world.from_main(settings.addresses or [server.address for server in started])
        servers = [Server(address, settings.server_timeout_s) for address in addresses]
        for server, own in zip(servers, started, strict=False):  # the main rank knows their processes
            server.explain = own.explain
        engine = VLLMEngine(
            policy,
            servers,
            world=world,
            weights_folder=settings.weights_folder,
            root=root,
            probe_ids=probe_ids,
            uses=uses,
        )
        engine.on_close = on_failure.pop_all().close
        return engine


def _start(
    config: Config, world: World, policy: Policy, path: str, uses: Sequence, folder: Path, stack: contextlib.ExitStack
) -> list:
    """Servers on this machine, when all answer."""
    from grpo.vllm.check import DTYPE_NAMES, max_lora_rank
    from grpo.vllm.server import StartedServer
    from grpo.vllm.weights import MOST

    settings, path, rank = config.rollout, base_of(path), max_lora_rank(policy)
    if world.num_machines > 1:
        remedy = "start vLLM yourself, and name the addresses in rollout.server"
        raise ConfigError(f"rollout.server=start is for one machine, and this run has {world.num_machines}: {remedy}")
    longest = max((prompt + sampling.max_completion_length for prompt, sampling in uses), default=None)
    options = {"--dtype": DTYPE_NAMES[policy.precision], "--logprobs-mode": "processed_logprobs"}
    if longest is not None:
        options["--max-model-len"] = str(max(longest, MOST + 1))
    if policy.device.type == "cpu":
        options["--no-enable-chunked-prefill"] = None
    if rank is not None:
        options |= {"--enable-lora": None, "--max-lora-rank": str(rank)}
    options |= {"--enable-scale-out": None, "--disable-uvicorn-access-log": None}
    model, started = os.path.abspath(path) if os.path.isdir(path) else snapshot_of(path), []
    for index in range(settings.num_servers):
        log = folder / f"vllm-{index}.log"
        started.append(StartedServer(settings.vllm_command, model, index, options, log))
        stack.callback(started[-1].close)
    print(f"starting vLLM (log: {', '.join(str(server.log) for server in started)}) ...", flush=True)
    for server in started:
        server.wait(settings.server_timeout_s)
    return started

"""Builds the engine that ``rollout.engine`` names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from grpo.config import Config, ConfigError
from grpo.distributed import World
from grpo.hub import snapshot_of
from grpo.model import Policy, base_of
from grpo.rollout.engine import BuiltinEngine
from grpo.rollout.interface import Engine
from grpo.system import import_extra


def build_engine(
    config: Config,
    world: World,
    policy: Policy,
    *,
    path: str,
    root: nn.Module,
    longest: int | None,
    probe_ids: Sequence[int],
    folder: str | Path,
    warn: Callable[[str], None],
    builtin: dict[str, Any],
) -> Engine:
    """The engine of a run, an evaluation or a chat. All ranks call it together.

    Args:
        policy: under FSDP its model is sharded.
        path: folder or Hub id of the model; of an adapter's folder, servers start with its model.
        root: the module that holds the policy's model, under FSDP the sharded one.
        longest: most tokens of a prompt and its completion; None: as many as the model allows.
        probe_ids: a prompt, for the check of the weights that a server has got.
        folder: gets the logs of servers.
        warn: called with lines for the console.
        builtin: further arguments of :class:`BuiltinEngine`. With ``policy`` among them it samples from that one, as it must under FSDP.

    Raises:
        ValueError: on all ranks, if a server cannot be started, or is not fit for this run.
    """
    if config.rollout.engine == "builtin":
        return BuiltinEngine(**{"policy": policy} | builtin, warn=warn)
    import_extra("urllib3", "vllm", "rollout.engine=vllm")
    with world.fail_together():
        _check_transfer(config, world, policy)
    from grpo.rollout.vllm import VLLMEngine

    with contextlib.ExitStack() as on_failure:
        addresses, logs = config.rollout.addresses, []
        with world.fail_together():
            if world.is_main and addresses is None:
                servers = _started_servers(config, world, policy, path, longest, folder, warn)
                on_failure.callback(servers.close)
                addresses, logs = servers.addresses, servers.logs
        addresses, logs = world.from_main((addresses, logs))
        settings = dict(world=world, rollout=config.rollout, root=root, probe_ids=probe_ids, logs=logs, warn=warn)
        engine = VLLMEngine(policy, addresses, **settings)
        engine.on_close = on_failure.pop_all().close
        return engine


def _check_transfer(config: Config, world: World, policy: Policy) -> None:
    """ConfigError unless the policy lies where ``rollout.weight_transfer`` can send it from."""
    r = config.rollout
    if r.weight_transfer == "file" or policy.adapter is not None:
        return
    if policy.device.type != "cuda":
        raise ConfigError(
            f"rollout.weight_transfer={r.weight_transfer} sends weights between GPUs, and this run has none: use file"
        )
    num_servers = r.num_servers if r.addresses is None else len(r.addresses)
    if r.weight_transfer == "ipc" and (world.size, num_servers) != (1, 1):
        raise ConfigError(
            f"rollout.weight_transfer=ipc is for one process and one server on the same GPU, and there are {world.size} and {num_servers}: use "
            "nccl or file"
        )


def _started_servers(
    config: Config, world: World, policy: Policy, path: str, longest: int | None, folder: str | Path, show
):
    """Servers on this machine (:class:`grpo.rollout.vllm.process.StartedServers`)."""
    from grpo.rollout.vllm.check import DTYPE_NAMES
    from grpo.rollout.vllm.process import StartedServers

    r, path = config.rollout, base_of(path)
    if world.num_machines > 1:
        raise ConfigError(
            f"rollout.server=start starts servers on one machine, and this run has {world.num_machines}: start vLLM yourself, and name the "
            "addresses in rollout.server"
        )
    return StartedServers(
        r.vllm_command,
        os.path.abspath(path) if os.path.isdir(path) else snapshot_of(path),
        num=r.num_servers,
        dtype=DTYPE_NAMES[policy.precision],
        max_model_len=longest,
        lora_rank=policy.adapter.config["r"] if policy.adapter is not None else None,
        weight_transfer=r.weight_transfer,
        folder=folder,
        timeout_s=r.server_timeout_s,
        show=show,
    )

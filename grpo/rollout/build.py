"""Builds the engine that ``rollout.engine`` names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from grpo.config import Config, ConfigError, RolloutConfig
from grpo.distributed import World
from grpo.hub import snapshot_of
from grpo.model import Policy, base_of
from grpo.rollout.draw import SamplingParams
from grpo.rollout.engine import BuiltinEngine
from grpo.rollout.interface import Engine
from grpo.system import import_extra
from grpo.system.environment_defaults import ALLOCATOR_NAMES, EXPANDABLE


def build_engine(
    config: Config,
    world: World,
    policy: Policy,
    *,
    path: str,
    root: nn.Module,
    uses: Sequence[tuple[int, SamplingParams | RolloutConfig]],
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
        uses: for each kind of sampling to come, the tokens of its longest prompt and its settings; empty: not known yet.
        probe_ids: a prompt, for the check of the weights that a server has got.
        folder: gets the logs of servers.
        warn: called with lines for the console.
        builtin: further arguments of :class:`BuiltinEngine`; a ``policy`` among them replaces the other one, under FSDP by the copy that samples.

    Raises:
        ValueError: on all ranks, if a server cannot be started, or is not fit for this run.
    """
    if config.rollout.engine == "builtin":
        return BuiltinEngine(**{"policy": policy} | builtin, warn=warn)
    import_extra("urllib3", "vllm", "rollout.engine=vllm")
    with world.fail_together():
        check_weight_transfer(config, world, policy)
    from grpo.rollout.vllm import VLLMEngine

    with contextlib.ExitStack() as on_failure:
        addresses, logs = config.rollout.addresses, []
        with world.fail_together():
            if world.is_main and addresses is None:
                servers = _started_servers(config, world, policy, path, uses, folder, warn)
                on_failure.callback(servers.close)
                addresses, logs = servers.addresses, servers.logs
        addresses, logs = world.from_main((addresses, logs))
        settings = dict(rollout=config.rollout, root=root, probe_ids=probe_ids, uses=uses, logs=logs, warn=warn)
        engine = VLLMEngine(policy, addresses, world=world, **settings)
        engine.on_close = on_failure.pop_all().close
        return engine


def check_weight_transfer(config: Config, world: World, policy: Policy) -> None:
    """ConfigError unless the policy lies where ``rollout.weight_transfer`` can send it from."""
    r = config.rollout
    if r.weight_transfer == "file" or policy.adapter is not None:
        return
    if policy.device.type != "cuda":
        raise ConfigError(
            f"rollout.weight_transfer={r.weight_transfer} sends weights between GPUs, and this run has none: use file"
        )
    num_servers = r.num_servers if r.addresses is None else len(r.addresses)
    if r.weight_transfer == "ipc" and any(EXPANDABLE in os.environ.get(name, "") for name in ALLOCATOR_NAMES):
        raise ConfigError(
            f"rollout.weight_transfer=ipc shares GPU memory with the server, for which {EXPANDABLE}, this program's default, is not fit: set "
            "PYTORCH_ALLOC_CONF=expandable_segments:False in the environment, or use file"
        )
    if r.weight_transfer == "ipc" and (world.size, num_servers) != (1, 1):
        raise ConfigError(
            f"rollout.weight_transfer=ipc is for one process and one server on the same GPU, and there are {world.size} and {num_servers}: use "
            "nccl or file"
        )


def _started_servers(
    config: Config,
    world: World,
    policy: Policy,
    path: str,
    uses: Sequence[tuple[int, Any]],
    folder: str | Path,
    warn: Callable,
):
    """Servers on this machine (:class:`grpo.rollout.vllm.process.StartedServers`)."""
    from grpo.rollout.vllm.check import DTYPE_NAMES
    from grpo.rollout.vllm.process import StartedServers
    from grpo.rollout.vllm.verify import FEWEST

    r, path = config.rollout, base_of(path)
    longest = max((prompt + sampling.max_completion_length for prompt, sampling in uses), default=None)
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
        max_model_len=longest and max(longest, 2 * FEWEST + 1),
        lora_rank=policy.adapter.peft_config["default"].r if policy.adapter is not None else None,
        weight_transfer=r.weight_transfer,
        folder=folder,
        timeout_s=r.server_timeout_s,
        show=warn,
    )

"""The vLLM engine (``rollout.engine=vllm``): servers get the weights before each rollout and sample
over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from grpo.config import Config
from grpo.distributed import World
from grpo.model import Policy
from grpo.rollout import Engine
from grpo.system import import_extra


def build_engine(
    config: Config,
    world: World,
    policy: Policy,
    *,
    path: str,
    root: nn.Module,
    longest: int,
    probe_ids: Sequence[int],
    folder: str | Path,
) -> Engine:
    """Start vLLM, or connect to its servers, for a run, an evaluation or a chat.

    All ranks call it together.

    Args:
        policy: under FSDP its model is sharded.
        path: folder or Hub id of the model; of an adapter's folder, servers start with its model.
        root: the module that holds the policy's model, under FSDP the sharded one.
        longest: the most tokens of a prompt and its completion; 0: not known.
        probe_ids: a prompt, for the proof that a server has the policy's weights.
        folder: gets the logs of servers.

    Raises:
        ValueError: on all ranks, if a server cannot be started, or is not fit for this run.
    """
    import_extra("httpx", "vllm", "rollout.engine=vllm")
    from grpo.vllm.client import Server
    from grpo.vllm.engine import VLLMEngine
    from grpo.vllm.server import start_server

    settings = config.rollout
    started = None
    with contextlib.ExitStack() as on_failure:
        with world.fail_together():
            if world.is_main and settings.addresses is None:
                started = start_server(
                    config, world, policy, path, longest, Path(folder), on_failure
                )
        addresses = world.from_main(settings.addresses or [started and started.address])
        servers = [Server(address, config.runtime.timeout_s / 3) for address in addresses]
        if started:  # by the main rank
            servers[0].explain = started.explain
        engine = VLLMEngine(
            policy,
            servers,
            world=world,
            weights_folder=settings.weights_folder,
            root=root,
            probe_ids=probe_ids,
        )
        engine.on_close = on_failure.pop_all().close
        return engine

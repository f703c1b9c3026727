"""The vLLM engine (``rollout.engine=vllm``), which loads the weights into vLLM servers before each
rollout and samples from the servers over HTTP."""

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
    """Start a vLLM server, or connect to the servers of ``rollout.server``, and return the engine.

    All ranks call it together.

    Args:
        policy: the policy, whose model is sharded under FSDP.
        path: folder or Hub id of the model. If it is the folder of an adapter, the server starts
            with the base model.
        root: the module that holds the policy's model, under FSDP the root of the sharded modules.
        longest: largest number of tokens in a prompt and its completion; 0 if it is not known.
        probe_ids: token ids of a prompt. Their log-probs prove that a server has the policy's
            weights.
        folder: folder for the log of a server that is started.

    Raises:
        ValueError: on all ranks, if a server cannot be started or reached, or cannot sample for
            this policy.
    """
    import_extra("httpx", "vllm", "rollout.engine=vllm")
    # Imported after the check above, since these modules import httpx.
    from grpo.vllm.client import Server
    from grpo.vllm.engine import VLLMEngine
    from grpo.vllm.server import start_server

    settings = config.rollout
    started = None
    # If anything fails from here on, the server that was started ends.
    with contextlib.ExitStack() as on_failure:
        # If the start fails, the other ranks must not wait for the address.
        with world.fail_together():
            if world.is_main and settings.addresses is None:
                # The limit of prompts may be far above the model's context, and vLLM refuses such a
                # length.
                longest = min(longest, policy.context_length or longest)
                started = start_server(
                    config, world, policy, path, longest, Path(folder), on_failure
                )
        addresses = settings.addresses
        if started:
            addresses = [started.address]
        # The main rank alone knows the address of a server that it has started.
        addresses = world.broadcast_from_main(addresses)
        # The other ranks wait in a collective, which fails after timeout_s. An error that names the
        # server has to come earlier.
        timeout_s = config.runtime.timeout_s / 3
        servers = [Server(address, timeout_s) for address in addresses]
        if started:
            servers[0].explain = started.explain
        engine = VLLMEngine(
            policy,
            servers,
            world=world,
            weights_folder=settings.weights_folder,
            root=root,
            probe_ids=probe_ids,
        )
        # Nothing has failed: from here on the engine ends the server.
        engine.on_close = on_failure.pop_all().close
        return engine

"""Uses of torchrun's key-value store (TCPStore) beside the collectives: agreeing on a launch, and a flag that any rank may set."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from grpo.distributed.world import World


def agree_on_launch_id(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """A name that the ranks of this launch agree on, and that ranks of an earlier launch cannot have.

    When torchrun restarts its processes (``--max-restarts``), its store may still hold addresses of processes that died (torch 2.13,
    ``--standalone``), and a rank that connects to one of them fails. So each rank publishes a fresh random number, rank 0 publishes the
    list of these numbers under a new name, and a rank accepts the name whose list contains its own number.

    Raises:
        ValueError: if the other ranks do not start within ``timeout_s`` seconds.
    """
    own_number, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    store.set(f"grpo/here/{rank}", own_number)
    listed: list[str] = []
    while time.monotonic() < deadline:
        if rank == 0:
            keys = [f"grpo/here/{r}" for r in range(size)]
            numbers = [store.get(key).decode() for key in keys] if store.check(keys) else []
            if numbers != listed:  # a number of a dead process was replaced
                listed = numbers
                store.set("grpo/start", json.dumps([uuid.uuid4().hex, listed]))
        if store.check(["grpo/start"]):
            name, present = json.loads(store.get("grpo/start"))
            if len(present) == size and present[rank] == own_number:
                store.set(f"grpo/{name}/{rank}", "")
                if store.check([f"grpo/{name}/{r}" for r in range(size)]):
                    return f"grpo/{name}"
        time.sleep(0.01)
    raise ValueError(f"rank {rank} of {size} waited {timeout_s:g} s for the others to start (runtime.timeout_s)")


class SharedFlag:
    """Texts in torchrun's store that any rank can set and all can read without a collective, which would wait for every rank."""

    def __init__(self, launch_id: str) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        options = dict(is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        self._store = dist.TCPStore(host, port, **options)
        self._launch_id = launch_id

    def set(self, name: str, text: str) -> None:
        self._store.set(f"{self._launch_id}/{name}", text)

    def set_first(self, name: str, text: str) -> None:
        """Set a text, unless a rank has set it before."""
        self._store.compare_set(f"{self._launch_id}/{name}", "", text)

    def get(self, name: str) -> str | None:
        """The text of this name; None before any rank has set it. RuntimeError if the store's process has ended."""
        key = f"{self._launch_id}/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None


def open_shared_flag(world: World) -> SharedFlag | None:
    """The flag of this launch; None for a rank that is alone, or where the store cannot be reached."""
    with contextlib.suppress(RuntimeError, KeyError):
        return SharedFlag(world.launch_id) if not world.is_alone else None
    return None

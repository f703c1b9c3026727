"""Starting a rank: torchrun's environment, device, CPU threads, process group."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from grpo.distributed.device import choose_device
from grpo.distributed.store import agree_on_launch_id
from grpo.distributed.world import World
from grpo.system import end_with_parent

if TYPE_CHECKING:  # sampling and scoring import this module, and do without pydantic
    from grpo.config import RuntimeConfig


def start_world(runtime: RuntimeConfig) -> World:
    """Read torchrun's environment, choose the device, divide the CPU cores among local ranks, join the process group.

    Raises:
        ValueError: if this rank has no device (:func:`choose_device`), or the other ranks do not start within ``runtime.timeout_s``
            seconds.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process is in a torch.distributed process group already: destroy_process_group() comes before training"
        )
    _end_with_torchrun()
    rank, size, local_rank, local_size = launch_environment()
    local_size = max(local_size, local_rank + 1)  # launchers other than torchrun may not set LOCAL_WORLD_SIZE
    device = choose_device(runtime.device, local_rank, local_size)
    set_cpu_threads(runtime, local_size)
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    launch_id = ""
    if "RANK" in os.environ:
        timeout = timedelta(seconds=runtime.timeout_s)
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        launch_id = agree_on_launch_id(store, rank, size, runtime.timeout_s)
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        if backend == "nccl" and runtime.offload == "all":  # the gradient's norm is then summed in host memory
            backend = "cpu:gloo,cuda:nccl"
        options = dict(rank=rank, world_size=size, timeout=timeout, device_id=device_id)
        # Return when all ranks have connected: gloo prints errors on a rank whose peer has ended before, with a user error for example.
        os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
        dist.init_process_group(backend, store=dist.PrefixStore(launch_id, store), **options)
    keeps_collectives = bool(launch_id and os.environ.get("GRPO_TEST_COLLECTIVES"))
    return World(rank, size, local_rank, device, launch_id, keeps_collectives, num_machines=max(size // local_size, 1))


def set_cpu_threads(runtime: RuntimeConfig, local_size: int = 1) -> None:
    """Set the CPU threads of this process: ``runtime.threads_per_rank``, else ``OMP_NUM_THREADS``, else the cores divided by the ranks.

    With several ranks ``OMP_NUM_THREADS=1`` does not count: torchrun sets it if the user has not.
    """
    # "4,2" is for nested parallelism: the first number is that of the outermost level.
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    is_number = wanted.isdecimal() and len(wanted) < 5  # torch refuses a number beyond 64 bits
    from_user = int(wanted) if is_number and not (local_size > 1 and int(wanted) == 1) else 0
    # Ranks that each start as many threads as there are cores compete for them (80 times slower, measured on two cores).
    torch.set_num_threads(runtime.threads_per_rank or from_user or max(available_cores() // local_size, 1))


def launch_environment() -> tuple[int, int, int, int]:
    """``(rank, world size, local rank, local world size)`` from torchrun's environment variables; ``(0, 1, 0, 1)`` without them."""
    if "RANK" not in os.environ:
        return 0, 1, 0, 1
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return tuple(int(os.environ.get(name, default)) for name, default in defaults.items())


def _end_with_torchrun() -> None:
    """Ask the kernel (Linux) for SIGTERM when torchrun is killed: its ranks would otherwise train on, or wait for each other forever."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    end_with_parent(signal.SIGTERM)
    # torchrun may have been killed before this request: its ranks then belong to process 1. In a container torchrun may be process 1.
    if os.getppid() == 1 and not _is_python(pid=1):
        sys.exit(128 + signal.SIGTERM)


def _is_python(pid: int) -> bool:
    """True if the process runs Python, or if its command line cannot be read."""
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def available_cores() -> int:
    """Cores this process may use: a container's CPU set is often smaller than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

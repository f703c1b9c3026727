"""Starting a rank: torchrun's environment, device, CPU threads, process group."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from grpo.distributed.world import World
from grpo.system import end_with_parent

if TYPE_CHECKING:  # sampling and scoring import this module, and do without pydantic
    from grpo.config import RuntimeConfig


_NUMBERS = itertools.count()
"""Of the process groups that this process joins: all ranks count alike."""


def start_world(runtime: RuntimeConfig) -> World:
    """Read torchrun's environment, choose the device, share the CPU cores among local ranks, join
    the process group.

    Raises:
        ValueError: if this rank has no device. PyTorch's own error, if the other ranks do not start
            within ``runtime.timeout_s`` seconds.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Ranks would train on, or wait forever, when torchrun is killed.
        end_with_parent(signal.SIGTERM)
    rank, size, local_rank, local_size = launch_environment()
    device = _choose_device(runtime.device, local_rank, local_size)
    set_cpu_threads(runtime, local_size)
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    keeps_collectives = False
    if "RANK" in os.environ:
        keeps_collectives = "GRPO_TEST_COLLECTIVES" in os.environ
        timeout = timedelta(seconds=runtime.timeout_s)
        # torchrun opens its store before it starts ranks: one that does not answer was killed.
        is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        patience = timedelta(seconds=30) if is_open else timeout
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=patience))
        store.set_timeout(timeout)
        # torchrun's store still holds what processes before a restart (--max-restarts) wrote, and
        # what an earlier run of this process did.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"grpo/{attempt}/{next(_NUMBERS)}"
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and runtime.offload == "all":
            # The gradient's norm is then summed in host memory.
            backend = "cpu:gloo,cuda:nccl"
        # Return when all ranks have connected: gloo prints errors on a rank whose peer has ended
        # before, for example with a user error.
        os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(prefix, store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    return World(
        rank,
        size,
        local_rank,
        device,
        keeps_collectives,
        num_machines=max(size // local_size, 1),
    )


def set_cpu_threads(runtime: RuntimeConfig, local_size: int = 1) -> None:
    """Set the CPU threads of this process: ``runtime.threads_per_rank``, else ``OMP_NUM_THREADS``,
    else cores / ranks.

    With several ranks ``OMP_NUM_THREADS=1`` does not count: torchrun sets it if the user has not.
    """
    from_user = os.environ.get("OMP_NUM_THREADS")  # PyTorch has read it
    if runtime.threads_per_rank:
        torch.set_num_threads(runtime.threads_per_rank)
    elif not from_user or (local_size > 1 and from_user == "1"):
        # Ranks that each start as many threads as there are cores are 80 times slower (measured on
        # two cores).
        torch.set_num_threads(max(available_cores() // local_size, 1))


def launch_environment() -> tuple[int, int, int, int]:
    """``(rank, world size, local rank, local world size)`` from torchrun's variables; without them
    ``(0, 1, 0, 1)``."""
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    # Launchers other than torchrun may not set it.
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return rank, size, local_rank, max(local_size, local_rank + 1)


def available_cores() -> int:
    """Cores this process may use: a container's CPU set is often smaller than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """A rank's own GPU, or the CPU where there are no GPUs; ``wanted`` is ``runtime.device``."""
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
        # Where NVIDIA's driver is, ranks must not become CPU ranks, one for each GPU.
        if wanted == "cuda" or (shutil.which("nvidia-smi") and not is_hidden):
            raise ValueError(
                f"PyTorch {torch.__version__} (for CUDA {torch.version.cuda}) cannot use a GPU of this machine: "
                "install a PyTorch for the CUDA version that `nvidia-smi` prints, or set runtime.device=cpu"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_size > count:
        raise ValueError(
            f"{local_size} processes, but {count} CUDA devices here: use --nproc_per_node={count}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device

"""Start of a rank: torchrun's environment, device, CPU threads, process group."""

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


_PROCESS_GROUP_NUMBERS = itertools.count()
"""Counter of the process groups that this process joins, one after another. All ranks join the same
groups, so a group has the same number on every rank."""


def start_world(runtime: RuntimeConfig) -> World:
    """Read torchrun's environment, choose the device, divide the CPU cores among the ranks of this
    machine, and join the process group.

    Without torchrun the world is this process alone, and there is no process group.

    Raises:
        ValueError: if this rank needs a GPU and cannot use one.
        RuntimeError: from PyTorch, if the other ranks do not start within ``runtime.timeout_s``
            seconds.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Otherwise ranks would continue to train, or wait forever, when torchrun is killed.
        end_with_parent(signal.SIGTERM)
    rank, size, local_rank, local_size = launch_environment()
    device = _choose_device(runtime.device, local_rank, local_size)
    set_cpu_threads(runtime, local_size)
    if runtime.deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size. It reads this variable when
        # it starts, so it must be set before the first CUDA operation.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    always_communicates = False
    if "RANK" in os.environ:
        always_communicates = "GRPO_TEST_COLLECTIVES" in os.environ
        timeout = timedelta(seconds=runtime.timeout_s)
        # torchrun opens its store before it starts ranks: a store that does not answer at once
        # belongs to a torchrun that was killed.
        store_is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        connect_timeout = timedelta(seconds=30) if store_is_open else timeout
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=connect_timeout))
        store.set_timeout(timeout)
        # torchrun's store still holds the entries of processes before a restart (--max-restarts),
        # and of an earlier run of this process. A prefix keeps the new entries apart from the old
        # ones.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"grpo/{attempt}/{next(_PROCESS_GROUP_NUMBERS)}"
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and runtime.offload == "all":
            # The gradients lie in host memory, where NCCL cannot sum their norms.
            backend = "cpu:gloo,cuda:nccl"
        # init_process_group() must return only when all ranks have connected. Otherwise gloo prints
        # errors on a rank whose peer has already ended, for example with a user error.
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
        device,
        always_communicates,
        num_machines=max(size // local_size, 1),
    )


def set_cpu_threads(runtime: RuntimeConfig, local_size: int) -> None:
    """Set the number of CPU threads of this process: ``runtime.threads_per_rank``, else
    ``OMP_NUM_THREADS``, else the cores of this machine divided by the number of its ranks.

    With several ranks ``OMP_NUM_THREADS=1`` is ignored: torchrun sets this value if the user has
    set none.
    """
    omp_num_threads = os.environ.get("OMP_NUM_THREADS")
    is_from_torchrun = local_size > 1 and omp_num_threads == "1"
    if runtime.threads_per_rank:
        torch.set_num_threads(runtime.threads_per_rank)
    # A number that the user set is in force already: PyTorch reads the variable on import.
    elif not omp_num_threads or is_from_torchrun:
        # Ranks that each start as many threads as there are cores are 80 times slower (measured on
        # two cores).
        torch.set_num_threads(max(available_cores() // local_size, 1))


def launch_environment() -> tuple[int, int, int, int]:
    """Return ``(rank, world size, local rank, local world size)`` from torchrun's environment
    variables. Without these variables, return ``(0, 1, 0, 1)``."""
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    # Launchers other than torchrun may not set LOCAL_WORLD_SIZE. A local rank of 3 means at least 4
    # ranks.
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return rank, size, local_rank, max(local_size, local_rank + 1)


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # The CPU set of a container is often smaller than the machine. macOS has no CPU sets.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _choose_device(setting: str, local_rank: int, local_size: int) -> torch.device:
    """Return the GPU of this rank, or the CPU if there is no GPU or ``setting`` is ``cpu``.

    Args:
        setting: value of ``runtime.device``.
    """
    if setting == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # A machine with NVIDIA's driver has GPUs. A PyTorch that cannot use these GPUs would
        # silently train on the CPU, with one rank per GPU.
        has_driver = shutil.which("nvidia-smi") is not None
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
        if setting == "cuda" or (has_driver and not is_hidden):
            raise ValueError(
                f"PyTorch {torch.__version__} (for CUDA {torch.version.cuda}) "
                "cannot use a GPU of this machine: install a PyTorch for the CUDA version "
                "that `nvidia-smi` prints, or set runtime.device=cpu"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_size > count:
        raise ValueError(
            f"{local_size} processes, but {count} CUDA devices here: use --nproc_per_node={count}"
        )
    device = torch.device("cuda", local_rank)
    # Otherwise NCCL and plain "cuda" tensors of every rank would use GPU 0.
    torch.cuda.set_device(device)
    return device

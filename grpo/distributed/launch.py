"""Starting a rank: torchrun's environment, device, CPU threads, process group."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from grpo.distributed.world import World
from grpo.system import end_with_parent

if TYPE_CHECKING:  # sampling and scoring import this module, and do without pydantic
    from grpo.config import RuntimeConfig


def start_world(runtime: RuntimeConfig) -> World:
    """Read torchrun's environment, choose the device, share the CPU cores among local ranks, join the process group.

    Raises:
        ValueError: if this rank has no device, or the other ranks do not start within ``runtime.timeout_s`` seconds.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks would train on, or wait forever, when torchrun is killed
        end_with_parent(signal.SIGTERM)
    rank, size, local_rank, local_size = launch_environment()
    if rank >= size:
        raise ValueError(f"RANK={rank} and WORLD_SIZE={size}: ranks count from 0 to WORLD_SIZE - 1")
    local_size = max(local_size, local_rank + 1)  # launchers other than torchrun may not set LOCAL_WORLD_SIZE
    device = _choose_device(runtime.device, local_rank, local_size)
    set_cpu_threads(runtime, local_size)
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    keeps_collectives = "RANK" in os.environ and bool(os.environ.get("GRPO_TEST_COLLECTIVES"))
    if "RANK" in os.environ:
        timeout = timedelta(seconds=runtime.timeout_s)
        # torchrun opens its store before it starts ranks: one that does not answer was killed.
        is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=30) if is_open else timeout))
        store.set_timeout(timeout)
        store = dist.PrefixStore(_agree_on_prefix(store, rank, size, runtime.timeout_s), store)
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        if backend == "nccl" and runtime.offload == "all":  # the gradient's norm is then summed in host memory
            backend = "cpu:gloo,cuda:nccl"
        # Return when all ranks have connected: gloo prints errors on a rank whose peer has ended before, for example
        # with a user error.
        os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
        options = dict(rank=rank, world_size=size, timeout=timeout, device_id=device_id)
        dist.init_process_group(backend, store=store, **options)
    return World(rank, size, local_rank, device, keeps_collectives, num_machines=max(size // local_size, 1))


def set_cpu_threads(runtime: RuntimeConfig, local_size: int = 1) -> None:
    """Set the CPU threads of this process: ``runtime.threads_per_rank``, else ``OMP_NUM_THREADS``, else cores / ranks.

    With several ranks ``OMP_NUM_THREADS=1`` does not count: torchrun sets it if the user has not.
    """
    from_user = os.environ.get("OMP_NUM_THREADS")  # PyTorch has read it
    if runtime.threads_per_rank:
        torch.set_num_threads(runtime.threads_per_rank)
    elif not from_user or (local_size > 1 and from_user == "1"):
        # Ranks that each start as many threads as there are cores are 80 times slower (measured on two cores).
        torch.set_num_threads(max(available_cores() // local_size, 1))


def launch_environment() -> tuple[int, int, int, int]:
    """``(rank, world size, local rank, local world size)`` from torchrun's variables; without them ``(0, 1, 0, 1)``."""
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return tuple(int(os.environ.get(name, default)) for name, default in defaults.items())


def available_cores() -> int:
    """Cores this process may use: a container's CPU set is often smaller than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """A rank's own GPU, or the CPU where there are no GPUs; ``wanted`` is ``runtime.device``."""
    has_cuda = torch.cuda.is_available()
    if wanted != "cpu" and not has_cuda and (wanted == "cuda" or _has_nvidia_gpus()):
        raise ValueError(
            f"PyTorch {torch.__version__} (for CUDA {torch.version.cuda}) cannot use a GPU of this machine: install a "
            "PyTorch for the CUDA version that `nvidia-smi` prints, or set runtime.device=cpu"
        )
    if wanted == "cpu" or not has_cuda:
        return torch.device("cpu")
    if local_size > (count := torch.cuda.device_count()):
        raise ValueError(f"{local_size} processes, but {count} CUDA devices here: use --nproc_per_node={count}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _has_nvidia_gpus() -> bool:
    """True if the driver lists a GPU, unless ``CUDA_VISIBLE_DEVICES`` hides all of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1") or not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    return listed.startswith("GPU")


def _agree_on_prefix(store: dist.Store, rank: int, size: int, timeout_s: float) -> str:
    """A prefix of keys in torchrun's store that the ranks of this launch share, and earlier processes do not.

    When torchrun restarts its processes (``--max-restarts``), its store still holds what dead ones wrote (torch 2.13),
    and a rank that connects to one of these fails. So each rank publishes a fresh random number; the prefix is a digest
    of all, valid when every rank has confirmed it: a dead process cannot confirm a new rank's number.
    """
    keys, deadline = [f"grpo/{other}" for other in range(size)], time.monotonic() + timeout_s
    store.set(keys[rank], uuid.uuid4().hex)
    while time.monotonic() < deadline:
        if store.check(keys):
            prefix = hashlib.sha256(b"".join(store.multi_get(keys))).hexdigest()
            store.set(f"{prefix}/{rank}", "")
            if store.check([f"{prefix}/{other}" for other in range(size)]):
                return prefix
        time.sleep(0.02)
    raise ValueError(f"rank {rank} of {size} waited {timeout_s:g} s for the others to start (runtime.timeout_s)")

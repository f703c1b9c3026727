"""The only file that knows there are other ranks: start, sums, votes, DDP, shutdown.

Works the same under torchrun on GPUs (NCCL), under torchrun on CPU (gloo), and as a plain single process with no launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PR_SET_PDEATHSIG = 1


class RanksDisagree(RuntimeError):
    """One or more ranks failed; raised on all of them, with the first failing rank's message."""


class Interrupted(BaseException):
    """A rank was asked to stop by a signal; like KeyboardInterrupt no ``except Exception`` may swallow it."""


@dataclass
class World:
    """This process among the ranks of the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    attempt: str = ""
    """What the ranks of this start have in common, and no other start of the same torchrun."""
    phase: str = field(default="start", compare=False)
    """What this rank is doing, for the message when a collective times out."""
    local_work: Callable[[], contextlib.AbstractContextManager] = field(default=contextlib.nullcontext, compare=False)
    """Marks work inside of which no other rank is waited for: a signal to stop may break it off (:class:`Interrupted`), and the
    vote that follows it tells the others. Set by ``grpo.run.signals``."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def timed(self, phase: str, seconds: dict[str, float]) -> Iterator[None]:
        """Name what this rank is doing, and add the seconds it took to ``seconds[phase]``."""
        outer, self.phase = self.phase, phase
        start = time.perf_counter()
        with torch.profiler.record_function(phase):  # a name in a trace; costs nothing without one
            yield
        # Only here, not in a `finally`: after a failure the phase stays what it was, for the message.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
        self.phase = outer

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over ranks, a new tensor on the same device."""
        return self._reduce(tensor, "sum")

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks, a new tensor on the same device."""
        return self._reduce(tensor, "max")

    def all_true(self, here: bool) -> bool:
        """A vote: whether every rank says yes. All ranks get the same answer, so that all take the same branch."""
        return not bool(self.max(torch.tensor(0.0 if here else 1.0)))

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n, ...]`` on each rank to ``[n * size, ...]`` in dataset order: rank r holds global rows r, r + size, ... ."""
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows, device=self.device) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(parts, rows.to(self.device).contiguous()))
        return torch.stack(parts, dim=1).flatten(0, 1).to(rows.device)

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`gather_rows`: this rank's share of global rows."""
        return rows[self.rank :: self.size]

    def gather_objects(self, thing: Any) -> list[Any]:
        """One picklable object per rank, in rank order, on every rank."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        self._collective(lambda: dist.all_gather_object(things, thing))
        return things

    def raise_together(self, error: BaseException | None) -> None:
        """Vote on a failure that may have happened on some ranks only: if any failed, all raise, and none is left waiting.

        Raises:
            Interrupted: on all, if any rank was asked to stop.
            RanksDisagree: with the first failing rank's message; on that rank the error itself.
        """
        if self.all_true(error is None):
            return
        if not self.all_true(not isinstance(error, Interrupted)):
            raise Interrupted
        messages = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        rank = next(r for r, message in enumerate(messages) if message is not None)
        if error is not None and rank == self.rank:
            raise error
        raise RanksDisagree(f"rank {rank}: {messages[rank]}")

    def same_everywhere(self, thing: str, otherwise: str) -> None:
        """Check that all ranks have the same ``thing``.

        Raises:
            ValueError: on all ranks, with the message ``otherwise``, if a rank has another one.
        """
        values = self.gather_objects(thing)
        if len(set(values)) > 1:
            others = [rank for rank, value in enumerate(values) if value != values[0]]
            raise ValueError(f"{otherwise}: rank {', '.join(map(str, others))} differs from rank 0")

    def together(self, build: Callable[[], Any]) -> Any:
        """What ``build`` gives on each rank; if it fails on one (a file that one machine lacks), all stop with its message."""
        built, error = None, None
        try:
            built = build()
        except Exception as caught:  # voted on, then raised on all ranks
            error = caught
        self.raise_together(error)
        return built

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank runs the block before the others (which then find its result on disk).

        A failure, on whichever rank, is raised on all.
        """
        error: Exception | None = None
        if not self.is_main:
            self.raise_together(None)
        try:
            yield
        except Exception as caught:  # voted on, not swallowed
            error = caught
        self.raise_together(error)
        if self.is_main:
            self.raise_together(None)

    def data_parallel(self, module: nn.Module, first_forward: Callable[[nn.Module], torch.Tensor]) -> nn.Module:
        """Wrap in DistributedDataParallel, and settle the order of its buckets.

        DDP rebuilds its buckets after the first backward in the order in which gradients arrived; another bucket order is
        another order of summation, so a run resumed at step s would differ in the last bits from one that was not
        (visible from three ranks on). Two backwards of a zero loss here put that behind us. ``first_forward`` maps the
        wrapped module to any scalar that depends on all its parameters.
        """
        if self.size == 1:
            return module
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        # The argument that keeps a forward pass from sending buffers was renamed in torch 2.13, where the old one warns.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        wrapped = DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True, **{name: False})
        for _ in range(2):
            self._collective(lambda: (first_forward(wrapped) * 0.0).backward())
        wrapped.zero_grad(set_to_none=True)
        return wrapped

    def synchronise_if(self, is_last: bool, module: nn.Module) -> contextlib.AbstractContextManager:
        """Gradients are averaged over ranks by the backward pass of the last micro-batch only."""
        if is_last or not isinstance(module, DistributedDataParallel):
            return contextlib.nullcontext()
        return module.no_sync()

    def shutdown(self) -> None:
        """Leave the process group, after a run that ended well."""
        if dist.is_initialized():
            # gloo's thread takes the GIL once more after a collective, to drop its last reference to the tensors. A process
            # group that is destroyed (by DDP's reducer, say) with the GIL held joins that thread: a deadlock (torch 2.13, seen
            # with 3 ranks on 2 cores). Sleeping hands the GIL over.
            time.sleep(0.1)
            dist.destroy_process_group()

    def abandon(self, code: int) -> None:
        """End this process at once after a failure: destructors may wait for collectives that the others never join."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.size > 1:
            os._exit(code)
        sys.exit(code)

    def _reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        if self.size == 1:
            return tensor.clone()
        result = tensor.detach().to(self.device, copy=True)
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        self._collective(lambda: dist.all_reduce(result, op=operation))
        return result.to(tensor.device)

    def _collective(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:  # a timeout blames the waiting rank: say what this one was waiting in
            print(f"[rank {self.rank}] gave up while in phase {self.phase!r}: {error}", file=sys.stderr, flush=True)
            raise


WORLD_KEYS = {"device", "timeout_s", "threads_per_rank", "deterministic"}
"""Of the section ``runtime``: what :func:`start_world` takes."""


def start_world(
    *,
    device: str = "auto",
    timeout_s: float = 1800.0,
    threads_per_rank: int | None = None,
    deterministic: bool = False,
) -> World:
    """Read torchrun's environment, pick the device, share out the CPU cores, join the process group.

    Raises:
        ValueError: if CUDA is asked for where there is none, or there are fewer GPUs than local ranks.
    """
    leave_with_torchrun()
    rank, size, local_rank, local_size = launched_as()
    local_size = max(local_size, local_rank + 1)  # other launchers than torchrun may not say it
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise ValueError("runtime.device=cuda, but PyTorch sees no CUDA device: use runtime.device=auto or cpu")
    use_cuda = cuda and device != "cpu"
    if use_cuda and local_size > torch.cuda.device_count():
        raise ValueError(
            f"{local_size} processes on this machine, but {torch.cuda.device_count()} CUDA devices: "
            f"use --nproc_per_node={torch.cuda.device_count()}"
        )
    # Ranks that each start as many threads as there are cores fight for them (80 times slower, measured on two cores).
    torch.set_num_threads(threads_per_rank or max(available_cores() // local_size, 1))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    where = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(where)
    attempt = ""
    if "RANK" in os.environ:
        timeout = timedelta(seconds=timeout_s)
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        attempt = _meet(store, rank, size, timeout_s)
        dist.init_process_group(
            "nccl" if use_cuda else "gloo",
            store=dist.PrefixStore(attempt, store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=where if use_cuda else None,
        )
    return World(rank, size, local_rank, where, attempt)


def leave_with_torchrun() -> None:
    """Ask the kernel (Linux) for SIGTERM when torchrun is killed: its ranks would train on, or wait for each other, and nobody could tell."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # It was killed before we asked; in a container it may be process 1 itself.
    if os.getppid() == 1 and not _is_python(pid=1):
        sys.exit(128 + signal.SIGTERM)


def _is_python(pid: int) -> bool:
    """Also where it cannot be known."""
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def _meet(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """A word that the ranks of this start, and they alone, agree on.

    When torchrun starts its processes again (``--max-restarts``) its store may still hold the addresses of the ones that died
    (torch 2.13, ``--standalone``): a rank that reads one of those tries to reach a dead process, and the restart fails. So each
    rank puts up a number drawn just now; rank 0 lists them under a new word; a rank takes the word whose list has its number.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    store.set(f"grpo/here/{rank}", mine)
    listed: list[str] = []
    while time.monotonic() < deadline:
        if rank == 0:
            keys = [f"grpo/here/{r}" for r in range(size)]
            here = [store.get(key).decode() for key in keys] if store.check(keys) else []
            if here != listed:  # one of them was of a process that is no more
                listed = here
                store.set("grpo/start", json.dumps([uuid.uuid4().hex, listed]))
        if store.check(["grpo/start"]):
            word, present = json.loads(store.get("grpo/start"))
            if len(present) == size and present[rank] == mine:
                store.set(f"grpo/{word}/{rank}", "")
                if store.check([f"grpo/{word}/{r}" for r in range(size)]):
                    return f"grpo/{word}"
        time.sleep(0.01)
    raise ValueError(f"rank {rank} of {size} waited {timeout_s:g} s for the others to start (runtime.timeout_s)")


class Noticeboard:
    """One word that any rank can put up for all to see, outside of the collectives (those wait for everyone).

    It hangs in the store through which torchrun's processes found each other, on a connection of its own.
    """

    def __init__(self, attempt: str) -> None:
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
        )
        self._key = f"{attempt}/notice"

    def write(self, word: str) -> None:
        self._store.set(self._key, word)

    def read(self) -> str | None:
        """The word, None while there is none.

        Raises:
            RuntimeError: if the store has gone.
        """
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None


def open_noticeboard(world: World) -> Noticeboard | None:
    """None for a single rank, or where the store cannot be reached: signals are then agreed at votes only."""
    if world.size == 1:
        return None
    try:
        return Noticeboard(world.attempt)
    except (RuntimeError, KeyError):
        return None


def launched_as() -> tuple[int, int, int, int]:
    """``(rank, world size, local rank, local world size)`` from torchrun's environment; ``(0, 1, 0, 1)`` without it."""
    if "RANK" not in os.environ:
        return 0, 1, 0, 1
    return tuple(int(os.environ.get(k, d)) for k, d in (
        ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"),
    ))  # fmt: skip


def available_cores() -> int:
    """Cores this process may use (a container's CPU set is often smaller than the machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

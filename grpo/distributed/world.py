"""One process among the ranks of a run: its number and device, sums and votes over all ranks, its
end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OtherRankFailed(RuntimeError):
    """Another rank failed; the message is the first failing rank's."""


class Interrupted(BaseException):
    """A signal asked the run to stop. Like KeyboardInterrupt, no ``except Exception`` may catch
    it."""


@dataclass
class World:
    """This process among the ranks of the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    num_machines: int = field(default=1, kw_only=True)
    """Machines of this launch."""
    keeps_collectives: bool = False
    """With one rank, communicate as with several (tests only: ``GRPO_TEST_COLLECTIVES=1`` under
    torchrun)."""
    phase: str = field(default="start", compare=False)
    """The part of a step that this rank is in, or the last complete one ("after update"), for error
    messages."""
    stop_signal: int | None = field(default=None, compare=False)
    """The signal that asked this rank to stop (set by ``grpo.run.signals``)."""
    may_interrupt: bool = field(default=False, compare=False)
    """True inside :meth:`interruptible`: a signal handler may raise :class:`Interrupted` now."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """True if there is no other rank, so that collectives and DDP are left out."""
        return self.size == 1 and not self.keeps_collectives

    @contextlib.contextmanager
    def timed(self, phase: str, seconds: dict[str, float]) -> Iterator[None]:
        """Set ``phase`` for the block, then to "after" it, and add the seconds that it took to
        ``seconds[phase]``."""
        self.phase = phase
        start = time.perf_counter()
        with torch.profiler.record_function(
            phase
        ):  # names the block in a profiler trace; free without a profiler
            yield
        # Not in a `finally`: after a failure the phase stays as it was, for the error message.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
        self.phase = f"after {phase}"

    def sum(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over ranks; a new tensor on the same device."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over ranks; a new tensor on the same device."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def all_true(self, local_value: bool) -> bool:
        """A vote: True if ``local_value`` is true on every rank. All ranks get the same answer and
        so take the same branch."""
        return not bool(self.max(torch.tensor(0.0 if local_value else 1.0)))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """``[n, ...]`` on each rank to ``[n * size, ...]`` on all; rank r holds the global rows r,
        r + size, ... ."""
        if self.is_single_process:
            return rows
        local_rows = rows.to(self.device).contiguous()
        parts = [torch.empty_like(local_rows) for _ in range(self.size)]
        dist.all_gather(parts, local_rows)
        in_turn = torch.stack(parts, dim=1)
        return in_turn.flatten(0, 1).to(rows.device)

    def local_rows(self, rows: Tensor) -> Tensor:
        """This rank's share of global rows; the inverse of :meth:`gather_rows`."""
        return rows[self.rank :: self.size]

    def gather_objects(self, thing: Any) -> list[Any]:
        """One picklable object per rank, in rank order, on every rank."""
        if self.is_single_process:
            return [thing]
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def from_main(self, thing: Any) -> Any:
        """The main rank's picklable object, on every rank."""
        return self.gather_objects(thing)[0]

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """Run the block on every rank, then vote: if it raised on any rank, all raise, and none
        waits for the others.

        The block must not call a collective: a rank that fails before it would leave the others
            waiting in it.

        Raises:
            Interrupted: on all ranks, if a signal interrupted any of them.
            OtherRankFailed: with the message of the first failing rank, which raises its own error.
        """
        error: BaseException | None = None
        try:
            yield
        except (Exception, Interrupted) as caught:
            error = caught
        if self.all_true(error is None):
            return
        told = None
        if error is not None:
            told = (self.rank, isinstance(error, Interrupted), f"{type(error).__name__}: {error}")
        failures = [failure for failure in self.gather_objects(told) if failure is not None]
        if any(is_interrupted for _, is_interrupted, _ in failures):
            raise Interrupted
        first, _, message = failures[0]
        if first == self.rank:
            raise error
        raise OtherRankFailed(f"rank {first}: {message}")

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block, inside :meth:`fail_together`, that a stop signal ends at once with
        :class:`Interrupted`."""
        self.may_interrupt = True
        try:
            if self.stop_signal is not None:
                raise Interrupted
            yield
        finally:
            self.may_interrupt = False

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on the main rank, then on the others, which find its result on disk. All
        fail together."""
        for is_turn_of_main in (True, False):
            with self.fail_together():  # the other ranks wait here
                if self.is_main == is_turn_of_main:
                    yield

    def check_same(self, values: dict[str, Any]) -> None:
        """ValueError on all ranks that names the first key, if a value is not the same on all
        ranks."""
        main, *others = self.gather_objects(values)
        for rank, other in enumerate(others, start=1):
            for name in main | other:
                value = main.get(name)
                if other.get(name) != value:
                    raise ValueError(
                        f"{name} is {value!r} on rank 0 and {other.get(name)!r} on rank {rank}: all ranks need the same"
                    )

    def shutdown(self) -> None:
        """Leave the process group after a run that ended well."""
        if dist.is_initialized():
            # gloo's thread takes the GIL once more after a collective, to release the tensors.
            # Destroying a process group while holding the GIL joins that thread: a deadlock (torch
            # 2.13). Sleeping releases the GIL.
            time.sleep(0.1)
            dist.destroy_process_group()

    def exit_now(self, code: int) -> None:
        """End this process after a failure; with several ranks without destructors, which could
        wait for the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        if not self.is_single_process:
            os._exit(code)
        sys.exit(code)

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp) -> Tensor:
        if self.is_single_process:
            return tensor.clone()
        result = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(result, op=operation)
        return result.to(tensor.device)

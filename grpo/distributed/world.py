"""One rank of a run: its number and device, sums and votes over all ranks, and the end of the
process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OtherRankFailed(RuntimeError):
    """Another rank failed. The message has the error of the lowest rank that failed."""


class Interrupted(BaseException):
    """A signal asked the run to stop. Like KeyboardInterrupt, this class is no ``Exception``, so
    that code of users and libraries does not catch it."""


@dataclass
class World:
    """This process as one rank of the run, and its collectives with the other ranks."""

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""
    device: torch.device
    always_communicates: bool = False
    """True if a single rank calls collectives as several ranks do (tests only:
    ``GRPO_TEST_COLLECTIVES=1`` under torchrun)."""
    num_machines: int = 1
    """Number of machines on which this run has ranks."""
    phase: str = "start"
    """Part of a step that this rank is computing ("update") or has just completed ("after update").
    Error messages name the phase."""
    stop_signal: int | None = None
    """Number of the signal that asked this rank to stop, set by ``grpo.run.signals``. Default: no
    signal."""
    may_interrupt: bool = False
    """True inside the block of :meth:`interruptible`, where a signal handler may raise
    :class:`Interrupted`."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """True if there is no other rank. Collectives and DDP are then left out."""
        return self.size == 1 and not self.always_communicates

    @contextlib.contextmanager
    def timed(self, phase: str, seconds: dict[str, float]) -> Iterator[None]:
        """Set :attr:`phase` for the block, and add the seconds that the block took to
        ``seconds[phase]``."""
        self.phase = phase
        start = time.perf_counter()
        # Names the block in a profiler's trace, and is free without a profiler.
        with torch.profiler.record_function(phase):
            yield
        # Not in a `finally`: after a failure the phase stays as it was, for the error message. CUDA
        # kernels run asynchronously: without this wait, their time would count for the next phase.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
        self.phase = f"after {phase}"

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over ranks, a new tensor on the same device."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks, a new tensor on the same device."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def all_true(self, local_value: bool) -> bool:
        """Vote: return True on all ranks if ``local_value`` is true on every rank, else False on
        all ranks. So all ranks take the same branch."""
        dissent = torch.tensor(0.0 if local_value else 1.0)
        return not bool(self.max(dissent))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks in global order, ``[n * size, ...]`` from ``[n, ...]`` on
        each rank. Global row ``i`` is on rank ``i % size``."""
        if self.is_single_process:
            return rows
        local_rows = rows.to(self.device).contiguous()
        parts = [torch.empty_like(local_rows) for _ in range(self.size)]
        dist.all_gather(parts, local_rows)
        # Rank r holds the global rows r, r + size, ...: the first rows of all ranks come first.
        rows_by_rank = torch.stack(parts, dim=1)
        return rows_by_rank.flatten(0, 1).to(rows.device)

    def local_rows(self, rows: Tensor) -> Tensor:
        """Return this rank's rows out of the rows of all ranks; the inverse of
        :meth:`gather_rows`."""
        return rows[self.rank :: self.size]

    def gather_objects(self, local_object: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order, on every rank."""
        if self.is_single_process:
            return [local_object]
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, local_object)
        return objects

    def broadcast_from_main(self, local_object: Any) -> Any:
        """Return the picklable object of the main rank on every rank."""
        return self.gather_objects(local_object)[0]

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """Run the block on every rank, then vote. If the block raised on any rank, all ranks raise,
        so that no rank waits for a failed rank.

        The block must not call a collective: if one rank fails before the collective, the other
        ranks would wait in the collective for this rank.

        Raises:
            Interrupted: on all ranks, if a signal interrupted any rank.
            OtherRankFailed: with the message of the lowest rank that failed, on all ranks except
                this lowest rank. The lowest rank that failed raises its original error.
        """
        error: BaseException | None = None
        try:
            yield
        except (Exception, Interrupted) as caught:
            error = caught
        if self.all_true(error is None):
            return
        # A description, since not every exception can be pickled.
        local_failure = None
        if error is not None:
            is_interrupted = isinstance(error, Interrupted)
            local_failure = (self.rank, is_interrupted, f"{type(error).__name__}: {error}")
        failures = list(filter(None, self.gather_objects(local_failure)))
        # A rank that was interrupted has not failed, and may have made another rank fail.
        if any(is_interrupted for _, is_interrupted, _ in failures):
            raise Interrupted
        first_rank, _, message = failures[0]
        if first_rank == self.rank:
            raise error
        raise OtherRankFailed(f"rank {first_rank}: {message}")

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a stop signal end the block at once with :class:`Interrupted`. The block must lie
        inside :meth:`fail_together`, so that the other ranks stop too."""
        self.may_interrupt = True
        try:
            # The signal may have come before the block, when it could not interrupt.
            if self.stop_signal is not None:
                raise Interrupted
            yield
        finally:
            self.may_interrupt = False

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on the main rank first, then on the other ranks, which can use files that
        the main rank has written. If the block fails on one rank, all ranks raise an error."""
        for is_turn_of_main in (True, False):
            # The ranks that do not run the block now wait in the vote at its end.
            with self.fail_together():
                if self.is_main == is_turn_of_main:
                    yield

    def check_same(self, values: dict[str, Any]) -> None:
        """Raise a ValueError on all ranks if ``values`` differ between ranks. The message has the
        first name with different values."""
        main_values, *others = self.gather_objects(values)
        for rank, other_values in enumerate(others, start=1):
            # A name may be missing on one of the two ranks.
            for name in main_values | other_values:
                main = main_values.get(name)
                other = other_values.get(name)
                if other != main:
                    raise ValueError(
                        f"{name} is {main!r:.200} on rank 0 and {other!r:.200} on rank {rank}: "
                        "all ranks need the same"
                    )

    def shutdown(self) -> None:
        """Leave the process group after a run that ended well."""
        if dist.is_initialized():
            # gloo's thread takes the GIL once more after a collective, to release the tensors.
            # destroy_process_group() waits for this thread and holds the GIL: a deadlock (torch
            # 2.13). Sleeping releases the GIL.
            time.sleep(0.1)
            dist.destroy_process_group()

    def exit_now(self, code: int) -> None:
        """End this process after a failure, with the exit code ``code``."""
        sys.stdout.flush()
        sys.stderr.flush()
        # Destructors, which os._exit() leaves out, could wait for the other ranks.
        if not self.is_single_process:
            os._exit(code)
        sys.exit(code)

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp) -> Tensor:
        if self.is_single_process:
            return tensor.clone()
        # A copy, since the collective writes into it.
        result = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(result, op=operation)
        return result.to(tensor.device)

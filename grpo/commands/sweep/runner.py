"""Runs the training script for each planned run, several at once, each in a process of its own; and what becomes of signals and failures."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from grpo.commands.sweep.plan import PlannedRun
from grpo.config import Config
from grpo.distributed import available_cores
from grpo.library import SCRIPT
from grpo.system import end_with_parent, printable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.2
LOG_END = 65536
"""Bytes at the end of a log file that are searched for the error."""


@dataclass(frozen=True)
class Place:
    """The share of the machine that one run gets."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 1


def places(config: Config, jobs: int) -> list[Place]:
    """The share of each of ``jobs`` runs at once: GPUs where there are any, which runs share if there are fewer of them; else CPU threads."""
    gpus = [] if config.runtime.device == "cpu" else _gpus()
    share = max(len(gpus) // jobs, 1)
    is_chosen = config.runtime.threads_per_rank is not None or "OMP_NUM_THREADS" in os.environ
    threads = max(available_cores() // (jobs * share), 1)
    arguments = () if is_chosen or jobs == 1 else (f"runtime.threads_per_rank={threads}",)
    if not gpus:
        return [Place(arguments)] * jobs
    starts = [job * share % len(gpus) for job in range(jobs)]
    return [Place(arguments, {"CUDA_VISIBLE_DEVICES": ",".join(gpus[s : s + share])}, share) for s in starts]


def _gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else list(map(str, range(count))))[:count]


@dataclass
class Outcome:
    """The end of a sweep's runs."""

    failed: list[tuple[PlannedRun, str]] = field(default_factory=list)
    """Each failed run with the last line of its error."""
    signal: int | None = None
    """The signal that stopped the sweep."""


def run_all(
    runs: Sequence[PlannedRun], shares: Sequence[Place], on_start: Callable[[PlannedRun], None],
    on_end: Callable[[PlannedRun, float, str | None], None],
) -> Outcome:  # fmt: skip
    """Run all, one in each place at a time. A run that fails stops no other; a stop signal is passed on, and no further run starts.

    Args:
        on_end: called with the run, its seconds, and the last line of its error or None.
    """
    waiting, free, outcome = deque(runs), list(shares), Outcome()
    running: dict[subprocess.Popen, tuple[PlannedRun, Place, float, int]] = {}

    def stop(number: int, frame: object) -> None:
        outcome.signal = outcome.signal or number
        for process in running:
            process.send_signal(number)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        if before[number] is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    try:
        while running or (waiting and outcome.signal is None):
            while waiting and free and outcome.signal is None:
                run, place = waiting.popleft(), free.pop(0)
                on_start(run)
                log_size = run.log.stat().st_size if run.log.exists() else 0
                process = _start(run, place)
                running[process] = run, place, time.monotonic(), log_size
                if outcome.signal is not None:  # it came while the process started
                    process.send_signal(outcome.signal)
            time.sleep(POLL_SECONDS)
            for process in [process for process in running if process.poll() is not None]:
                run, place, started, log_size = running.pop(process)
                free.append(place)
                if process.returncode and outcome.signal is not None:
                    continue  # it was stopped, and has saved
                error = _error(run.log, log_size, process.returncode) if process.returncode else None
                on_end(run, time.monotonic() - started, error)
                if error is not None:
                    outcome.failed.append((run, error))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return outcome


def _start(run: PlannedRun, place: Place) -> subprocess.Popen:
    """Start one run. It has a session of its own, so that Ctrl-C in a terminal reaches it once, through the sweep; it saves if the sweep is killed."""
    command = [sys.executable]
    if place.ranks > 1:
        command += ["-m", "grpo.distributed.torchrun", "--standalone", f"--nproc_per_node={place.ranks}"]
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with open(run.log, "ab") as log:
        return subprocess.Popen(
            [*command, str(SCRIPT), *run.arguments, *place.arguments], env={"WANDB_RUN_GROUP": run.folder.parents[1].name} | os.environ | place.environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
        )  # fmt: skip


def _error(log: Path, start: int, code: int) -> str:
    """The last line of the error that a run printed from byte ``start`` of its log file on."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - LOG_END))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return printable((errors or lines or [f"exit code {code}"])[-1]).removeprefix("error: ")

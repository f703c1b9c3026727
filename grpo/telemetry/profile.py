"""One step of the main rank as a trace that Perfetto and ``chrome://tracing`` open (``runtime.profile``)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from grpo.config import Config
from grpo.distributed import World


def start_profiler(config: Config, world: World, step: int) -> torch.profiler.profile | None:
    """A running profiler if this (1-based) step of this rank is to be traced."""
    if step != config.runtime.profile or not world.is_main:
        return None
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    profiler.start()
    return profiler


def finish_profiler(profiler: torch.profiler.profile | None, run, step: int) -> None:
    """Write the trace; a disk that is full costs the trace, not the run."""
    if profiler is None:
        return
    profiler.stop()
    path = Path(run.config.output_dir) / f"trace_step_{step}.json.gz"
    try:
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        run.reporter.say(f"warning: no trace of step {step} ({error})")
        return
    run.reporter.say(f"profile   {path}; open it at https://ui.perfetto.dev")

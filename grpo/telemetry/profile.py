"""``runtime.profile``: records one step of the main rank as a trace for Perfetto or ``chrome://tracing``."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from grpo.config import Config
from grpo.distributed import World


def start_profiler(config: Config, world: World, step: int) -> torch.profiler.profile | None:
    """A running profiler if this rank records this step (counted from 1); else None."""
    if step != config.runtime.profile or not world.is_main:
        return None
    cuda = [ProfilerActivity.CUDA] if world.device.type == "cuda" else []
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True)
    profiler.start()
    return profiler


def finish_profiler(
    profiler: torch.profiler.profile | None, output_dir: str | Path, step: int, print_line: Callable[[str], None]
) -> None:
    """Write the trace; if that fails (the disk is full, for example), print a warning and let the run go on."""
    if profiler is None:
        return
    profiler.stop()
    path = Path(output_dir) / f"trace_step_{step}.json.gz"
    try:
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        print_line(f"warning: the trace of step {step} could not be written ({error})")
    else:
        print_line(f"profile   {path}; open it at https://ui.perfetto.dev")

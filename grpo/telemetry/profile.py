"""``runtime.profile``: records one step of the main rank as a trace for Perfetto or ``chrome://tracing``."""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile

from grpo.config import Config
from grpo.distributed import World


def start_profiler(config: Config, world: World, step: int) -> profile | None:
    """A running profiler if this rank records this step (counted from 1); else None."""
    if step != config.runtime.profile or not world.is_main:
        return None
    profiler = profile(record_shapes=True)
    profiler.start()
    return profiler


def finish_profiler(
    profiler: profile | None, output_dir: str | Path, step: int, print_line: Callable[[str], None]
) -> None:
    """Write the trace."""
    if profiler is not None:
        profiler.stop()
        path = Path(output_dir) / f"trace_step_{step}.json.gz"
        profiler.export_chrome_trace(str(path))
        print_line(f"profile   {path}; open it at https://ui.perfetto.dev")

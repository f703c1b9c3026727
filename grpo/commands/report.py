"""``python -m grpo.report RUN [RUN ...] [--watch] [--output FILE.html]``"""

import argparse
import time
from pathlib import Path

from grpo.commands.command import command
from grpo.report.page import build_page
from grpo.report.read import RunData, read_run
from grpo.system import write_atomically
from grpo.telemetry.terminal import survive_lost_readers

RELOAD_S = 5
"""Seconds between two pages with ``--watch``, and between two reloads of the open page."""


@command
def main(argv: list[str]) -> None:
    survive_lost_readers()
    description = "Write one HTML file that shows a run or compares several."
    parser = argparse.ArgumentParser(prog="python -m grpo.report", description=description)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", type=Path, help="output_dir of a run; the run may still be going on")
    add("--output", type=Path, help="default: report.html in the run's folder; of several runs, in the current folder")
    add("--watch", action="store_true", help="rewrite the file while the run goes on; the open page reloads itself")
    add("--max-samples", type=int, default=400, help="number of completions shown per run (default 400)")
    options = parser.parse_args(argv)
    options.output = options.output or (options.runs[0] if len(options.runs) == 1 else Path()) / "report.html"
    runs = _watch(options) if options.watch else _write(options)
    print(f"{options.output}: {len(runs)} run(s), {options.output.stat().st_size / 1e6:.1f} MB; open it in a browser")


def _write(options: argparse.Namespace, reload_s: float | None = None) -> list[RunData]:
    runs = [read_run(folder, max_samples=options.max_samples) for folder in options.runs]
    page = build_page(runs, reload_s=None if all(run.is_complete for run in runs) else reload_s)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, page)
    return runs


def _watch(options: argparse.Namespace) -> list[RunData]:
    """Write the page again and again, until all runs are complete or Ctrl-C; then it reloads itself no more."""
    try:
        start = time.monotonic()
        runs = _write(options, RELOAD_S)
        pause = max(RELOAD_S, 4 * (time.monotonic() - start))  # a fifth of one core at most: the run may need the rest
        print(f"{options.output} follows the run until Ctrl-C is pressed: open it in a browser", flush=True)
        while not all(run.is_complete for run in runs):
            time.sleep(pause)
            runs = _write(options, RELOAD_S)
        return runs
    except KeyboardInterrupt:
        return _write(options)

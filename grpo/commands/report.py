"""Write the HTML report of one run or several:
``python -m grpo.report RUN [RUN ...] [--watch] [--output FILE.html]``."""

import argparse
import contextlib
import time
from pathlib import Path

from grpo.commands.command import command
from grpo.report.page import build_page
from grpo.report.read import RunData, read_run
from grpo.system import write_atomically

RELOAD_S = 5
"""Seconds after which ``--watch`` writes a new page, and after which the open page reloads
itself."""


@command
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.report",
        description="Write one HTML file that shows a run or compares several.",
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        type=Path,
        help="output_dir of a run; the run may still be going on",
    )
    add(
        "--output",
        type=Path,
        help="default: report.html in the run's folder; of several runs, in the current folder",
    )
    add(
        "--watch",
        action="store_true",
        help="rewrite the file while the run goes on; the open page reloads itself",
    )
    add(
        "--max-samples",
        type=int,
        default=400,
        help="number of completions shown per run (default 400)",
    )
    options = parser.parse_args(argv)

    # A page of several runs belongs to no single run, so it is written to the current folder.
    folder = options.runs[0] if len(options.runs) == 1 else Path()
    output = options.output or folder / "report.html"

    if options.watch:
        print(f"{output} follows the run until Ctrl-C is pressed: open it in a browser")
    # Ctrl-C ends the watch, not the command: the last page is still written.
    with contextlib.suppress(KeyboardInterrupt):
        while options.watch:
            runs = _write(options, output, RELOAD_S)
            if all(run.is_complete for run in runs):
                break
            time.sleep(RELOAD_S)
    runs = _write(options, output, None)  # this page reloads itself no more
    print(
        f"{output}: {len(runs)} run(s), {output.stat().st_size / 1e6:.1f} MB; open it in a browser"
    )


def _write(
    options: argparse.Namespace,
    output: Path,
    reload_s: float | None,
) -> list[RunData]:
    """Write the page of all runs, and return the data of the runs.

    Args:
        reload_s: seconds after which the open page reloads itself; None if it does not.
    """
    runs = [read_run(folder, max_samples=options.max_samples) for folder in options.runs]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, build_page(runs, reload_s=reload_s))
    return runs

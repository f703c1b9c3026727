"""``python -m grpo.report RUN [RUN ...] [--watch] [--output FILE.html] [--figures FOLDER]``"""

import argparse
import sys
import time
from pathlib import Path

from grpo.report.figures import write_figures
from grpo.report.page import build_page
from grpo.report.read import RunData, read_run
from grpo.system import write_atomically
from grpo.telemetry.terminal import print_user_error, survive_lost_readers

RELOAD_S = 5
"""Seconds between two looks at the run with ``--watch``, and between two reloads of the open page."""


def main(argv: list[str]) -> int:
    survive_lost_readers()
    description = "Write one HTML file that shows a run or compares several."
    parser = argparse.ArgumentParser(prog="python -m grpo.report", description=description)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="output_dir of a run; the run may still be going on")
    add(
        "--output",
        help="the HTML file (default: report.html in the run's folder; for several runs, in the current folder)",
    )
    add("--watch", action="store_true", help="rewrite the file while the run goes on; the open page reloads itself")
    add("--figures", metavar="FOLDER", help="also write the main curves as PNG files to this folder (needs matplotlib)")
    add("--max-samples", type=int, default=400, help="number of completions shown per run (default 400)")
    options = parser.parse_args(argv)
    folder = Path(options.runs[0]) if len(options.runs) == 1 else Path()
    output = Path(options.output or folder / "report.html")
    try:
        runs = _watch(options, output) if options.watch else _write(options, output)
        print(f"{output}: {len(runs)} run(s), {output.stat().st_size / 1e6:.1f} MB")
        if options.figures:
            print(f"{options.figures}: {len(write_figures(runs, options.figures))} figures")
    except (ValueError, OSError) as error:
        print_user_error(error)
        return 2
    return 0


def _write(options: argparse.Namespace, output: Path, *, is_watched: bool = False) -> list[RunData]:
    runs = [read_run(folder, max_samples=options.max_samples) for folder in options.runs]
    is_over = all(run.is_complete for run in runs)
    page = build_page(runs, reload_s=RELOAD_S if is_watched and not is_over else None)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    return runs


def _watch(options: argparse.Namespace, output: Path) -> list[RunData]:
    """Write the page whenever a run has grown, until all runs are complete or Ctrl-C is pressed; then the page no longer reloads itself."""
    seen, seconds = None, 0.0
    try:
        while True:
            progress = [_progress(Path(folder)) for folder in options.runs]
            if progress != seen:
                start = time.monotonic()
                runs = _write(options, output, is_watched=True)
                seconds = time.monotonic() - start
                if all(run.is_complete for run in runs):
                    return runs
                if seen is None:
                    print(
                        f"{output}: open it in a browser; it follows the run until Ctrl-C is pressed here", flush=True
                    )
                seen = progress
            time.sleep(max(RELOAD_S, 4 * seconds))  # a fifth of one core at most: the run may need the rest
    except KeyboardInterrupt:
        return _write(options, output)


def _progress(folder: Path) -> tuple[int, list[str]]:
    """The size of ``metrics.jsonl`` in bytes and the names of the checkpoints, one of which changes when the run goes on."""
    metrics = folder / "metrics.jsonl"
    return metrics.stat().st_size if metrics.exists() else 0, sorted(path.name for path in folder.glob("checkpoint-*"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

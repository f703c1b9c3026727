"""``python -m grpo.report RUN [RUN ...] [--output FILE.html] [--figures FOLDER]``"""

import argparse
import sys
from pathlib import Path

from grpo.report.figures import write_figures
from grpo.report.page import build_page
from grpo.report.read import read_run
from grpo.system import write_atomically
from grpo.telemetry.terminal import survive_lost_readers
from grpo.telemetry.user_errors import print_user_error


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
    add("--figures", metavar="FOLDER", help="also write the main curves as PNG files to this folder (needs matplotlib)")
    add("--max-samples", type=int, default=400, help="number of completions shown per run (default 400)")
    options = parser.parse_args(argv)
    folder = Path(options.runs[0]) if len(options.runs) == 1 else Path()
    output = Path(options.output or folder / "report.html")
    try:
        runs = [read_run(folder, max_samples=options.max_samples) for folder in options.runs]
        page = build_page(runs)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, page)
        print(f"{output}: {len(runs)} run(s), {len(page) / 1e6:.1f} MB")
        if options.figures:
            print(f"{options.figures}: {len(write_figures(runs, options.figures))} figures")
    except (ValueError, OSError) as error:
        print_user_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

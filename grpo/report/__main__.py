"""``python -m grpo.report RUN [RUN ...] [--output FILE.html] [--figures FOLDER]``"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from grpo.report.figures import write_figures
from grpo.report.page import build_page
from grpo.report.read import read_run
from grpo.telemetry.console import print_mistake


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.report", description="One HTML file about one or several runs."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run, which may still be going on")
    parser.add_argument("--output", help="default: report.html in the run's folder, or here for several runs")
    parser.add_argument("--figures", metavar="FOLDER", help="write the main curves there as PNG (needs matplotlib)")
    parser.add_argument("--max-samples", type=int, default=400, help="completions of each run (default 400)")
    options = parser.parse_args(argv)
    output = Path(
        options.output or (Path(options.runs[0]) / "report.html" if len(options.runs) == 1 else "report.html")
    )
    try:
        runs = [read_run(folder, max_samples=options.max_samples) for folder in options.runs]
        page = build_page(runs)
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = output.with_name(output.name + ".tmp")
        temporary.write_text(page, encoding="ascii")
        os.replace(temporary, output)
        print(f"{output}: {len(runs)} run(s), {len(page) / 1e6:.1f} MB")
        if options.figures:
            written = write_figures(runs, options.figures)
            print(f"{options.figures}: {len(written)} figures")
    except (ValueError, OSError) as mistake:
        print_mistake(mistake)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

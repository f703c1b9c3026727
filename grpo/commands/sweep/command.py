"""Run a configuration with several values of some keys and several seeds, and compare the results in a table and a picture.

    python -m grpo.sweep --config configs/X.yaml --vary algorithm.aggregation=response_mean,constant --vary algorithm.scale=group,none
    python -m grpo.sweep --config configs/X.yaml --vary algorithm.beta=0.04,0.1 --vary algorithm.scale=none --one-at-a-time
    python -m grpo.sweep --table-only --output runs/sweep-X

All combinations of the values run, each with every seed; with --one-at-a-time the configuration as it is (`base`) and each value alone. All are
checked before the first one starts. Values are read as YAML; a comma inside brackets or quotes does not divide.

OUTPUT/<variant>/seed-<n>/ is an ordinary run, OUTPUT/<variant>/seed-<n>.log what it printed. The results are OUTPUT/sweep.md, sweep.json and
sweep.png (needs matplotlib). The same command continues a sweep that was stopped: complete runs are not repeated, the others go on from their
newest checkpoint. A run that fails stops no other; it is named at the end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.commands.sweep.picture import draw
from grpo.commands.sweep.plan import PlannedRun, make_plan, make_variants, read_seeds, read_vary
from grpo.commands.sweep.results import before_training, finished, measure, runs_in
from grpo.commands.sweep.runner import places, run_all
from grpo.commands.sweep.table import as_json, as_markdown, main_metric
from grpo.config import KEYS_EPILOG, ConfigError, check_world_size, masked_argument
from grpo.evaluation.intervals import LEVEL
from grpo.report.read import RunData, read_run
from grpo.system import write_atomically
from grpo.telemetry.console import evaluation_form
from grpo.telemetry.terminal import print_user_error, survive_lost_readers

Found = dict[str, dict[int, RunData]]
"""Variant -> seed -> files of the complete run."""


def main(argv: list[str]) -> int:
    survive_lost_readers()
    options, overrides = _parser().parse_known_args(argv)
    try:
        if options.table_only and options.config is None:
            return _existing(options, overrides)
        return _sweep(options, overrides)
    except (ValueError, OSError) as error:
        print_user_error(error)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.sweep", allow_abbrev=False, description=__doc__, epilog=KEYS_EPILOG,
        usage="python -m grpo.sweep --config FILE [--vary KEY=VALUE,... ...] [--seeds 0,1,2] [--jobs N] [--one-at-a-time] [--output DIR] "
        "[section.key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file of a run")
    add(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="a key and the values to try; can be repeated",
    )
    add("--seeds", default="0,1,2", help="seeds of each variant (default 0,1,2)")
    add("--one-at-a-time", action="store_true", help="`base` and each value alone, instead of all combinations")
    jobs = "runs at once (default 1): they share the GPUs, or the CPU cores, of this machine"
    add("--jobs", type=int, default=1, metavar="N", help=jobs)
    add(
        "--output", type=Path, metavar="DIR", help="folder of the runs (default runs/sweep-<name of the configuration>)"
    )
    add(
        "--metric",
        metavar="NAME",
        help="metric of the picture's second panel (default eval/mean@<k>, else eval/greedy_accuracy)",
    )
    add("--table-only", action="store_true", help="write table and picture of the runs that are complete; run nothing")
    return parser


def _sweep(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.config is None:
        raise ConfigError("a sweep needs a configuration: --config FILE; there are configs/*.yaml")
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: use 1 or more")
    varied = list(map(read_vary, options.vary))
    variants, seeds = make_variants(varied, one_at_a_time=options.one_at_a_time), read_seeds(options.seeds)
    output = options.output or Path("runs", f"sweep-{Path(options.config).stem}")
    runs, notes = make_plan(options.config, overrides, variants, seeds, output)
    shares = places(runs[0].config, options.jobs)
    found = {run: data for run in runs if (data := finished(run))}
    outcome = None
    if not options.table_only:
        print(
            f"sweep     {len(runs) // len(seeds)} variants x {len(seeds)} seeds = {len(runs)} runs; {len(found)} are complete"
        )
        print(f"output    {output}", *(f"note: {note}" for note in notes), sep="\n", flush=True)
        if missing := [run for run in runs if run not in found]:
            for run in missing:
                check_world_size(run.config, shares[0].ranks)
            outcome = run_all(missing, shares, _print_start, _print_end)
            found = {run: data for run in runs if (data := finished(run))}
    by_variant: Found = {run.variant: {} for run in runs}
    for run, data in found.items():
        by_variant[run.variant][run.seed] = data
    command = _command(options, overrides, varied, output)
    _write_results(output, by_variant, options.metric, {"command": command, "seeds": seeds})
    missing = [run for run in runs if run not in found]
    if missing:
        print(f"note: {len(missing)} of {len(runs)} runs are not complete")
    for run, error in outcome.failed if outcome else ():
        print_user_error(ValueError(f"{run}: {error} ({run.log})"))
    if outcome and outcome.signal is not None:
        print("stopped; the runs have saved, and the same command continues the sweep", flush=True)
        return 128 + outcome.signal
    return int(bool(outcome and outcome.failed))


def _command(
    options: argparse.Namespace, overrides: list[str], varied: Sequence[tuple[str, list[str]]], output: Path
) -> str:
    """The command of the sweep, with secrets masked."""
    words = ["python", "-m", "grpo.sweep", "--config", options.config]
    for key, values in varied:
        shown = [masked_argument(f"{key}={value}").removeprefix(f"{key}=") for value in values]
        words += ["--vary", f"{key}={','.join(shown)}"]
    words += ["--one-at-a-time"] * options.one_at_a_time
    words += ["--seeds", options.seeds, "--output", str(output), *map(masked_argument, overrides)]
    return shlex.join(words)


def _print_start(run: PlannedRun) -> None:
    print(f"start     {run}: {run.log}", flush=True)


def _print_end(run: PlannedRun, seconds: float, error: str | None) -> None:
    if error is not None:
        print(f"failed    {run}, after {seconds:.0f} s: {error}", flush=True)
        return
    numbers = measure(read_run(run.folder, max_samples=0))
    metric = main_metric(list(numbers))
    shown = f"{metric.removeprefix('eval/')} {evaluation_form(metric).format(numbers[metric])}" if metric else ""
    print(f"end       {run}, after {seconds:.0f} s: {shown or 'complete'}", flush=True)


def _existing(options: argparse.Namespace, overrides: list[str]) -> int:
    """Table and picture of what lies in a folder, without a configuration."""
    if options.output is None or options.vary or overrides:
        raise ConfigError("--table-only without --config takes --output DIR, and reads all runs in that folder")
    by_variant: Found = {}
    num_incomplete = 0
    for variant, seed, folder in runs_in(options.output):
        data = read_run(folder, max_samples=0)
        num_incomplete += not data.is_complete
        if data.is_complete:
            by_variant.setdefault(variant, {})[seed] = data
    if not by_variant:
        raise ValueError(f"{options.output} has no complete run <variant>/seed-<n>")
    _write_results(options.output, by_variant, options.metric, {})
    if num_incomplete:
        print(f"note: {num_incomplete} runs that are not complete are left out")
    return 0


def _write_results(output: Path, found: Found, metric: str | None, about: dict[str, Any]) -> None:
    """Write and print the table, and draw the picture."""
    numbers = {variant: {seed: measure(data) for seed, data in runs.items()} for variant, runs in found.items()}
    if not any(numbers.values()):
        return
    if before := before_training(found):
        numbers = {"before training": before} | numbers
    interval = {"level": LEVEL, "method": "Student's t over seeds, n - 1 degrees of freedom"}
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(
        output / "sweep.json", json.dumps(about | {"interval": interval, "variants": as_json(numbers)}, indent=1) + "\n"
    )
    table = as_markdown(numbers)
    command = f"```bash\n{about['command']}\n```\n\n" if about else ""
    write_atomically(output / "sweep.md", command + table)
    print(table)
    complete = {variant: runs for variant, runs in found.items() if runs}
    names = [name for runs in numbers.values() for one in runs.values() for name in one]
    try:
        draw(complete, metric or main_metric(names), output / "sweep.png")
        files = "sweep.md, sweep.json, sweep.png"
    except ValueError as error:
        files = f"sweep.md, sweep.json; no picture: {error}"
    print(f"written   {output}: {files}", flush=True)

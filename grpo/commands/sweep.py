"""Run a configuration with several values of some keys and several seeds, and compare the results.

    python -m grpo.sweep --config configs/X.yaml --vary algorithm.scale=group,none --vary algorithm.beta=0,0.04
    python -m grpo.sweep --config configs/X.yaml --one-at-a-time --vary algorithm.beta=0.1 --vary algorithm.scale=none
    python -m grpo.sweep --table-only --output runs/sweep-X

All combinations of the values run, each with every seed, one run after the other; with --one-at-a-time the
configuration as it is (`base`) and each value alone. All are checked before the first one starts. Values are read as
YAML; a comma inside brackets or quotes belongs to its value.

OUTPUT/<variant>/seed-<n>/ is an ordinary run, OUTPUT/<variant>/seed-<n>.log what it printed. The results are
OUTPUT/sweep.md, sweep.json and sweep.png (needs matplotlib). The same command continues a sweep that was stopped:
complete runs are not repeated, the others go on from their newest checkpoint. A run that fails stops no other; it is
named at the end, and the exit status is 1.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo.commands.command import command, command_parser
from grpo.commands.sweep_results import write_results
from grpo.config import (
    Config,
    ConfigError,
    check_world_size,
    load_config,
    make_config,
    masked_argument,
    settings_but,
)
from grpo.library import PAGE
from grpo.report.read import RunData, read_run
from grpo.run.user_functions import load_user_functions
from grpo.system import end_with_parent, printable
from grpo.telemetry.terminal import survive_lost_readers

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, eq=False)
class SweptRun:
    """One variant with one seed: an ordinary run."""

    variant: str
    """``base``, or ``section.key=value``, joined by commas if there are several; secrets are masked."""
    seed: int
    folder: Path
    arguments: tuple[str, ...] = ()
    """The training script's command line."""
    config: Config | None = None
    """None for a run that was found in a folder."""

    @property
    def log(self) -> Path:
        """The file with what the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


@command
def main(argv: list[str]) -> int:
    survive_lost_readers()
    parser = command_parser("sweep", __doc__)
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file of a run")
    add("--vary", action="append", default=[], metavar="KEY=VALUE,...", help="a key and the values to try")
    add("--seeds", default="0,1,2", help="seeds of each variant (default 0,1,2)")
    add("--one-at-a-time", action="store_true", help="`base` and each value alone, instead of all combinations")
    add("--output", type=Path, metavar="DIR", help="default: runs/sweep-<name of the configuration>")
    add("--metric", metavar="NAME", help="of the picture's second panel (default: mean@<k>, else greedy accuracy)")
    add("--table-only", action="store_true", help="write table and picture of the runs that are complete; run nothing")
    options, overrides = parser.parse_known_args(argv)
    if options.config is not None:
        output = options.output or Path("runs", f"sweep-{Path(options.config).stem}")
        seeds, base = list(map(int, options.seeds.split(","))), ["--config", options.config, *overrides]
        varied = read_varied(options.vary)
        runs = make_plan(base, varied, seeds, output, one_at_a_time=options.one_at_a_time)
        words = ["python", "-m", "grpo.sweep", *map(masked_argument, base), "--seeds", options.seeds]
        words += [word for values in varied for value in values for word in ("--vary", masked_argument(value))]
        about = shlex.join([*words, *["--one-at-a-time"] * options.one_at_a_time, "--output", str(output)])
    elif options.table_only and options.output is not None and not options.vary and not overrides:
        output, runs, about = options.output, runs_in(options.output), None
    else:
        raise ConfigError("a sweep needs --config FILE; --table-only also takes --output DIR alone")
    found = {run: data for run in runs if (data := finished(run))}
    failed, received = {}, []
    if not options.table_only:
        print(f"sweep     {len(runs)} runs in {output}; {len(found)} are complete", flush=True)
        # A complete run is started too: it ends at once, or with what has changed in its data or rewards.
        again = [run for run in found if run.config.checkpoint.resume == "auto"]
        failed, received = run_all([run for run in again if any(run.folder.glob("checkpoint-*"))])
        if not failed and not received:
            failed, received = run_all([run for run in runs if run not in found])
        found = {run: data for run in runs if run not in failed and (data := finished(run))}
    by_variant: dict[str, dict[int, RunData]] = {run.variant: {} for run in runs}
    for run, data in found.items():
        by_variant[run.variant][run.seed] = data
    if found:
        complete = {variant: seeds for variant, seeds in by_variant.items() if seeds}
        write_results(output, complete, options.metric, about)
    if len(found) < len(runs):
        print(f"note: {len(runs) - len(found)} of {len(runs)} runs are not in the table")
    for run, error in failed.items():
        print(f"error: {run}: {error} ({run.log})", file=sys.stderr)
    if received:
        print("stopped; the run has saved, and the same command continues the sweep", flush=True)
        return 128 + received[0]
    return int(bool(failed))


def read_varied(items: Sequence[str]) -> list[list[str]]:
    """``section.key=value,value`` of each ``--vary`` as ``[section.key=value, ...]``, one list a key."""
    varied: dict[str, list[str]] = {}
    for item in items:
        key, _, rest = item.partition("=")
        try:
            nodes = yaml.compose(f"[{rest}]", Loader=yaml.SafeLoader).value
        except yaml.YAMLError:
            nodes = []
        if not nodes:
            raise ConfigError(f"--vary {item}: write section.key=value,value,... with values in YAML")
        values = [f"[{rest}]"[node.start_mark.index : node.end_mark.index] for node in nodes]
        varied.setdefault(key, []).extend(f"{key}={value}" for value in values)
    return list(varied.values())


def make_plan(
    base: Sequence[str], varied: Sequence[Sequence[str]], seeds: Sequence[int], output: Path, *, one_at_a_time: bool
) -> list[SweptRun]:
    """All runs, seed by seed: each combination of the values or, with ``one_at_a_time``, ``base`` and each value alone.

    Args:
        base: the training script's arguments for all runs.

    Raises:
        ValueError: for the first run that cannot be.
    """
    if any(word.startswith(("seed=", "output_dir=")) for word in itertools.chain(base, *varied)):
        raise ConfigError("seed and output_dir cannot be set in a sweep: use --seeds and --output")
    alone = [(), *((change,) for change in itertools.chain(*varied))]
    variants = alone if one_at_a_time else list(itertools.product(*varied))
    ranks = num_ranks(load_config([*base, *variants[0]]))  # on which prompts_per_rank depends
    different: dict[str, tuple[tuple[str, ...], Config]] = {}
    for changes in variants:
        config = load_config([*base, *changes])
        check_world_size(config, ranks)
        load_user_functions(config)
        name = ",".join(map(masked_argument, changes)) or "base"
        if same := [other for other, (_, its) in different.items() if its.model_dump() == config.model_dump()]:
            print(f"note: {name} has the settings of {same[0]} and is left out")
        else:
            different[name] = changes, config
    runs = []
    for seed, (name, (changes, config)) in itertools.product(seeds, different.items()):
        folder = output / folder_name(name) / f"seed-{seed}"
        own: dict[str, Any] = {"seed": seed, "output_dir": str(folder)}
        if config.logging.has_dashboards:
            own["logging.run_name"] = f"{name}, seed {seed}"
        arguments = [*base, *changes, *(f"{key}={json.dumps(value)}" for key, value in own.items())]
        runs.append(SweptRun(name, seed, folder, tuple(arguments), load_config(arguments)))
    return runs


def num_ranks(config: Config) -> int:
    """The processes of a run: one for each GPU."""
    return 1 if config.runtime.device == "cpu" else max(torch.cuda.device_count(), 1)


def launcher(ranks: int) -> list[str]:
    """The beginning of the command of a run on this machine."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def folder_name(variant: str) -> str:
    """A variant's name; if it is long, or has characters unfit for a folder, without these and with a digest."""
    fit = re.sub(r"[^\w.=,+-]+", "-", variant).strip("-")
    if fit == variant and len(variant.encode()) <= 150:
        return variant
    return f"{fit[:60]}-{hashlib.sha256(variant.encode()).hexdigest()[:8]}"


def runs_in(output: Path) -> list[SweptRun]:
    """The runs that lie in the folder of a sweep; ``base`` first, then by name and seed."""
    folders = [folder for folder in output.glob("*/seed-*") if folder.is_dir()]
    runs = [SweptRun(folder.parent.name, int(folder.name.removeprefix("seed-")), folder) for folder in folders]
    if not runs:
        raise ValueError(f"{output} has no run <variant>/seed-<n>")
    return sorted(runs, key=lambda run: (run.variant != "base", run.variant, run.seed))


def finished(run: SweptRun) -> RunData | None:
    """The files of a run that is complete; None for one that has to start or to go on.

    Raises:
        ConfigError: if the folder has a checkpoint of a run with other settings.
    """
    file = run.folder / "config.yaml"
    if not file.exists():
        return None

    has_checkpoint = any(run.folder.glob("checkpoint-*"))
    if run.config and has_checkpoint and not run.config.checkpoint.accept_changes:
        mark = "may differ between runs that are compared"
        before = settings_but(mark, make_config(file))
        now = settings_but(mark, run.config)
        changes = [f"{key}: {before[key]!r}, now {now[key]!r}" for key in now if before[key] != now[key]]
        if changes:
            raise ConfigError(
                f"{run.folder} was started with other settings ({'; '.join(changes)}): "
                "use another --output, the old values, or checkpoint.accept_changes=true"
            )

    data = read_run(run.folder, max_samples=0)
    return data if data.is_complete else None


def run_all(runs: Sequence[SweptRun]) -> tuple[dict[SweptRun, str], list[int]]:
    """Run one after the other. A stop signal is passed on to the run, which saves; no further run starts.

    Returns:
        The last line of the error of each run that failed, and the signals.
    """
    failed: dict[SweptRun, str] = {}
    received: list[int] = []
    running: list[subprocess.Popen] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        for process in running:
            process.send_signal(number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    for run in runs:
        print(f"start     {run}: {run.log}", flush=True)
        started = time.monotonic()
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with open(run.log, "ab") as log:
            log_start = log.tell()
            running[:] = [
                subprocess.Popen(
                    [*launcher(num_ranks(run.config)), str(PAGE), *run.arguments], stdin=subprocess.DEVNULL,
                    env={"WANDB_RUN_GROUP": run.folder.parents[1].name} | os.environ,
                    stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the run once, through the sweep
                    preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),  # it saves if the sweep is killed
                )
            ]  # fmt: skip
        if received:  # it came while the process started
            running[0].send_signal(received[0])
        code = running[0].wait()
        if code and not received:
            text = printable(run.log.read_bytes()[log_start:].decode(errors="replace"))
            lines = [line for line in text.splitlines() if line.strip()] or [f"exit code {code}"]
            errors = [line for line in lines if line.startswith("error: ")]
            failed[run] = (errors or lines)[-1].removeprefix("error: ")
        outcome = "end" if code == 0 else "stopped" if received else "failed"
        print(f"{outcome:10}{run}, after {time.monotonic() - started:.0f} s", flush=True)
        if received:
            break
    return failed, received

r"""Train a configuration with several values of some keys and several seeds, and compare the
results.

    python -m grpo.sweep --config configs/X.yaml \
        --vary algorithm.scale=group,none --vary algorithm.beta=0,0.04
    python -m grpo.sweep --config configs/X.yaml --one-at-a-time \
        --vary algorithm.beta=0.1 --vary algorithm.scale=none

Each combination of the values is a variant. With --one-at-a-time, the variants are the
configuration as it is (`base`) and each value alone. Every variant runs with every seed, one run
after the other. The settings of all runs are checked before the first run starts. Values are read
as YAML: a comma inside brackets or quotes belongs to its value.

OUTPUT/<variant>,seed=<n>/ is the folder of a run, OUTPUT/<variant>,seed=<n>.log its printed
output. OUTPUT/sweep.md and sweep.csv compare the variants: the mean of each metric over the
seeds, and its difference to the first variant with the same seeds. The same command continues a
sweep that was stopped: each run goes on from its newest checkpoint. The warnings of a run are
printed when it has ended, unless an earlier run had the same. A run that fails does not stop
the others. It is named at the end, and the exit status is 1.
"""

import functools
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    mask_secrets,
)
from grpo.library import PAGE
from grpo.report.read import read_run
from grpo.run.user_functions import load_user_functions
from grpo.system import end_with_parent


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep: a variant with a seed."""

    variant: str
    """Name of the variant: ``base``, or its values as ``key=value``, joined by commas."""
    seed: int
    folder: Path
    log: Path
    """File with the printed output of the run."""
    arguments: list[str]
    """Command-line arguments of the training script."""
    config: Config


@command
def main(argv: list[str]) -> int:
    # SIGTERM, from a scheduler for example, ends a sweep as Ctrl-C does: the current run saves a
    # checkpoint first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = command_parser("sweep", __doc__)
    add = parser.add_argument
    add(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="a key and the values to try",
    )
    add("--seeds", default="0,1,2", help="seeds of each variant (default 0,1,2)")
    add(
        "--one-at-a-time",
        action="store_true",
        help="`base` and each value alone, instead of all combinations",
    )
    add(
        "--output", type=Path, metavar="DIR", help="default: runs/sweep-<name of the configuration>"
    )
    add("--table-only", action="store_true", help="compare the runs that are complete; run nothing")
    options, overrides = parser.parse_known_args(argv)
    # The folder of the sweep has the name of the configuration.
    if options.config is None:
        raise ConfigError("a sweep needs --config FILE")
    output = options.output or Path("runs", f"sweep-{Path(options.config).stem}")
    runs = make_plan(
        ["--config", options.config, *overrides],
        read_varied(options.vary),
        [int(seed) for seed in options.seeds.split(",")],
        output,
        one_at_a_time=options.one_at_a_time,
    )

    told = set()
    failures = []
    # All variants are entered before the first run starts. The first variant stays the first, even
    # if its first run fails.
    results = {run.variant: {} for run in runs}
    for number, run in enumerate(runs, 1):
        if not options.table_only:
            print(f"run {number} of {len(runs)}: {run.log}")
            # A complete run is started, too. It ends at once, or fails if its data or rewards have
            # changed since. Results of a failed run are not in the table.
            exit_code = train(run)
            printed = run.log.read_text(errors="replace")
            for warning in re.findall("^warning: .*", printed, re.MULTILINE):
                if warning not in told:
                    print(warning)
                told.add(warning)
            if exit_code != 0:
                # A run that was killed has printed none.
                errors = re.findall("^error: .*", printed, re.MULTILINE)
                failures.append(f"{run.folder.name} failed: {run.log} {''.join(errors[-1:])}")
                continue
        if (run.folder / "metrics.jsonl").exists():
            data = read_run(run.folder, max_samples=0)
            if data.is_complete:
                results[run.variant][run.seed] = data.metrics

    num_complete = sum(map(len, results.values()))
    if num_complete:
        write_results(output, results)
    print(f"{num_complete} of {len(runs)} runs are in the table")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def read_varied(items: Sequence[str]) -> list[list[str]]:
    """Split each ``section.key=value,value`` of ``--vary``. Returns one list of
    ``section.key=value`` for each key.

    Raises:
        ConfigError: if ``[value,value]`` is not a YAML list, or the list is empty.
    """
    varied: dict[str, list[str]] = {}
    for item in items:
        key, _, rest = item.partition("=")
        # YAML finds the commas between values. The text of each value is kept as written, because
        # it is passed to the configuration and names the variant.
        text = f"[{rest}]"
        try:
            nodes = yaml.compose(text, Loader=yaml.SafeLoader).value
        except yaml.YAMLError:
            nodes = []
        if not nodes:
            raise ConfigError(
                f"--vary {item}: write section.key=value,value,... with values in YAML"
            )
        for node in nodes:
            value = text[node.start_mark.index : node.end_mark.index]
            # The values of two --vary with the same key are joined into one list.
            varied.setdefault(key, []).append(f"{key}={value}")
    return list(varied.values())


def make_plan(
    base: Sequence[str],
    varied: Sequence[Sequence[str]],
    seeds: Sequence[int],
    output: Path,
    *,
    one_at_a_time: bool,
) -> list[SweptRun]:
    """Return all runs of a sweep, seed by seed, after a check of each run.

    Args:
        base: the training script's arguments for all runs.
        varied: the values of each key, as :func:`read_varied` returns them.
        one_at_a_time: if True, the variants are ``base``, and ``base`` with one value changed. If
            False, they are all combinations of the values.

    Raises:
        ValueError: a run is refused by the checks. The first such run is reported.
    """
    # The sweep sets seed and output_dir for each run.
    if any(word.startswith(("seed=", "output_dir=")) for word in itertools.chain(base, *varied)):
        raise ConfigError("seed and output_dir cannot be set in a sweep: use --seeds and --output")
    variants = list(itertools.product(*varied))
    if one_at_a_time:
        variants = [()]
        for settings in varied:
            variants += [(setting,) for setting in settings]
    names = variant_names(variants)

    runs = []
    # The runs are ordered by seed, so that a sweep that is stopped early has compared all variants.
    for seed in seeds:
        for name, changes in zip(names, variants, strict=True):
            folder = output / f"{name},seed={seed}"
            # The folder is quoted, because the value is read as YAML, and a folder's name may hold
            # ": ".
            output_dir = f"output_dir={json.dumps(str(folder))}"
            arguments = [*base, *changes, f"seed={seed}", output_dir]
            # A run makes the same checks before it loads a model.
            config = load_config(arguments)
            check_world_size(config, num_ranks(config))
            load_user_functions(config)
            # A run refuses to continue if settings of its training have changed, but accepts
            # changed settings of its evaluations. The table would then compare different
            # evaluations.
            has_checkpoint = any(folder.glob("checkpoint-*"))
            if has_checkpoint and make_config(folder / "config.yaml").eval != config.eval:
                raise ConfigError(
                    f"{folder} has evaluations with other settings: use another --output"
                )
            log = output / f"{folder.name}.log"
            runs.append(SweptRun(name, seed, folder, log, arguments, config))
    return runs


def variant_names(variants: Sequence[Sequence[str]]) -> list[str]:
    """Return names of the variants that a person can read and a folder can have, such as
    ``scale=none,beta=0.1``."""
    names = []
    for changes in variants:
        # Secrets are masked, because the names are printed and shown by a dashboard.
        text = ",".join(map(mask_secrets, changes)) or "base"
        # The file of a function would fill the row: mine/loss.py:f is f.
        text = re.sub(r"[\w./-]+\.py:", "", text)
        # Sections are left out, also as mappings: `algorithm={beta: 0}`.
        without_sections = re.sub(r"(?<![\w.])[\w.]+\.(?=\w+=)|\w+[=:] *\{", "", text)
        name = re.sub(r"[^\w.,=+-]+", "_", without_sections, flags=re.ASCII)[:100].strip("_")
        # Two variants may differ only in characters that are replaced or cut off above.
        if name in names:
            name = f"{name}-{len(names)}"
        names.append(name)
    return names


def num_ranks(config: Config) -> int:
    """Return the number of processes of a run: one for each GPU, or one on CPU."""
    return 1 if config.runtime.device == "cpu" else max(torch.cuda.device_count(), 1)


def train(run: SweptRun) -> int:
    """Start one run, wait for its end, and return its exit code. On Ctrl-C, the run saves a
    checkpoint and ends."""
    launcher = [sys.executable]
    ranks = num_ranks(run.config)
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with open(run.log, "ab") as log:
        process = subprocess.Popen(
            [*launcher, str(PAGE), *run.arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            # The run has a separate session. Otherwise Ctrl-C in the terminal would reach the sweep
            # and the run, and the run would be stopped twice.
            start_new_session=True,
            # If the sweep is killed, the run gets SIGTERM, and saves.
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
        )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        print("stopped; the run has saved, and the same command continues the sweep")
        raise

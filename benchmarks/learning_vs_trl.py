r"""Held-out accuracy by completions sampled and by minutes of training, beside TRL 1.16.0: same
initial model, same problems.

    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python
        3 seeds each, then the table
    python benchmarks/learning_vs_trl.py --table-only
        the table of the stored results
    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python --config X.yaml \
        --every 5 --sides ours "ours lora.rank=16" "trl 16+checkpointing" -- [section.key=value ...]

Settings of both: builtin:tiny, builtin:arithmetic in the order of our schedule, 8 problems x 8
completions a step, 64 tokens, temperature 1, rewards accuracy + 0.5 format, clip 0.2, beta 0,
rewards scaled by the group's std, loss averaged over responses, AdamW 2e-4 falling linearly to 0,
gradient norm 1, fp32, one CPU thread. Settings that differ from TRL's defaults (in brackets):
loss_type grpo (dapo), bf16 False (True where supported), gradient_checkpointing False (True),
steps_per_generation 1, shuffle_dataset False. The same code evaluates both on the same held-out
problems: 4 samples each at temperature 1, and greedily.

With --config all of these come from that file, also device, precision and runtime.threads_per_rank,
which both sides need. Three more tables follow: the accuracy by minute, the reward by step, and
accuracies with their 95% intervals, rewards, lengths, seconds and memory. A setting that TRL lacks
(several updates per rollout, a stop string, ...) stops the script with its name. Results go to the
folder of --runs, or to --output, a path without suffix.

A side of --sides is ``ours`` with further settings, or ``trl`` with the rows of a micro-batch and
perhaps ``+checkpointing``; by default a micro-batch has all rows of a step. Runs that are stored
already are left out. They are known by these words, not by what is in the file of --config: after a
change of it, name another --output. Several of these commands may run at once, with other sides or
seeds, for example each on a core of its own.

Seconds are those of the steps, without evaluations, logs and checkpoints. The peak of memory leaves
out evaluations and checkpoints, and of our side the process that computes rewards.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import (
    RESULTS,
    ROOT,
    about,
    add_run,
    markdown,
    parser,
    read_runs,
    run,
    versions,
)

from grpo.config import Config, load_config

GREEDY = "eval/greedy_accuracy"
DEFAULT = [
    "--config",
    str(ROOT / "configs/tiny_arithmetic.yaml"),
    "optim.max_steps=100",
    "data.max_eval_samples=256",
    "eval.num_samples=4",
    "eval.temperature=1.0",
    "runtime.threads_per_rank=1",
    "runtime.device=cpu",
    "runtime.precision=fp32",
]
"""The settings without --config."""
LABELS = {"ours": "this trainer", "trl": "TRL 1.16.0"}


def sampled_metric(config: Config) -> str:
    """The evaluation metric of the table: the mean over samples, or the greedy one without
    samples."""
    return f"eval/mean@{config.eval.num_sampled}" if config.eval.num_sampled else GREEDY


def run_side(side: str, seed: int, options: argparse.Namespace, config: Config) -> dict:
    """The results of one run, in a process of its own."""
    trainer, *words = shlex.split(side)
    settings = [*options.settings, f"seed={seed}"]
    python = Path(sys.executable)
    if trainer == "trl":
        python = Path(options.trl_python).absolute()
        rows = config.rollout.prompts_per_step * config.rollout.num_generations
        is_checkpointing = config.model.gradient_checkpointing
        microbatches = f"{rows}+checkpointing" if is_checkpointing else f"{rows}"
        settings = [*(words or [microbatches]), *settings]
    else:
        settings += words
    script = ROOT / f"benchmarks/{trainer}_side.py"
    with tempfile.TemporaryDirectory(dir=options.runs) as folder:
        output = Path(folder) / "run.json"
        run(python, script, output, str(options.every), *settings)
        found = json.loads(output.read_text())
    where = about(options)
    return found | {
        "date": where["date"],
        "machine": where["machine"],
        "versions": versions(python),
    }


def runs_of_sides(runs: list[dict]) -> dict[str, list[dict]]:
    """The runs of each side, ours first."""
    sides = {entry["side"]: [] for entry in sorted(runs, key=lambda entry: entry["side"])}
    for entry in runs:
        sides[entry["side"]].append(entry)
    return sides


def label(side: str) -> str:
    trainer, _, rest = side.partition(" ")
    return f"{LABELS[trainer]}, {rest}" if rest else LABELS[trainer]


def mean_and_range(values: list[float], digits: int) -> str:
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def values_at(runs: list[dict], step: int, metric: str, factor: float) -> list[float]:
    """A metric of each run after a step at which it was evaluated."""
    values = []
    for entry in runs:
        for point in entry["points"]:
            if point["step"] == step:
                values.append(factor * point[metric])
    return values


def table(runs: list[dict], config: Config) -> str:
    """Markdown: accuracy of sampled completions by completions sampled so far, mean and range over
    seeds."""
    sides = runs_of_sides(runs)
    per_step = config.rollout.prompts_per_step * config.rollout.num_generations
    steps = [point["step"] for point in runs[0]["points"]]
    lines = [(str(step * per_step), step, sampled_metric(config)) for step in steps]
    lines.append(("greedy, at the end", steps[-1], GREEDY))
    rows = []
    for name, step, metric in lines:
        cells = []
        for found in sides.values():
            cells.append(mean_and_range(values_at(found, step, metric, 100), 1))
        rows.append([name, *cells])
    return markdown(["completions sampled", *map(label, sides)], rows)


def table_by_minute(runs: list[dict], config: Config) -> str:
    """Markdown: accuracy of sampled completions at the newest evaluation by a minute of training.
    At most 12 rows."""
    sides = runs_of_sides(runs)
    longest = max(entry["seconds"] for entry in runs) / 60
    unit = next(unit for unit in (0.25, 0.5, 1, 2, 5, 10, 30, 60, 600) if longest <= 12 * unit)
    rows = []
    minute = 0.0
    while minute < longest + unit:
        cells = []
        for found in sides.values():
            values = []
            for entry in found:
                newest = [point for point in entry["points"] if point["seconds"] <= 60 * minute][-1]
                values.append(100 * newest[sampled_metric(config)])
            has_ended = all(entry["seconds"] <= 60 * minute for entry in found)
            cells.append(mean_and_range(values, 1) + (", ended" if has_ended else ""))
        rows.append([f"{minute:g}", *cells])
        minute += unit
    return markdown(["minutes of training", *map(label, sides)], rows)


def table_of_rewards(runs: list[dict]) -> str:
    """Markdown: the mean reward of five steps each, mean and range over seeds."""
    sides = runs_of_sides(runs)
    rows = []
    for start in range(0, runs[0]["steps"], 5):
        cells = []
        for found in sides.values():
            means = []
            for entry in found:
                means.append(statistics.mean(entry["reward_by_step"][start : start + 5]))
            cells.append(mean_and_range(means, 3))
        rows.append([f"{start + 1} to {start + 5}", *cells])
    return markdown(["reward, steps", *map(label, sides)], rows)


def metric_at(point_number: int, metric: str, factor: float) -> Callable[[dict], float]:
    """A function of a run: a metric of one of its evaluations."""
    return lambda entry: factor * entry["points"][point_number][metric]


def table_of_figures(runs: list[dict], config: Config) -> str:
    """Markdown: accuracies with 95% intervals, and what a run took."""
    sides = runs_of_sides(runs)
    rows = []

    def add(name: str, of_run: Callable[[dict], float], digits: int) -> None:
        cells = []
        for found in sides.values():
            cells.append(mean_and_range([of_run(entry) for entry in found], digits))
        rows.append([name, *cells])

    def add_with_interval(name: str, seed: int, point_number: int) -> None:
        """A greedy accuracy, with the 95% interval of the evaluation."""
        cells = []
        for found in sides.values():
            cell = "-"
            for entry in found:
                if entry["seed"] == seed:
                    point = entry["points"][point_number]
                    low, high = point["intervals"][GREEDY]
                    cell = f"{point[GREEDY]:.1%} ({low:.1%} to {high:.1%})"
            cells.append(cell)
        rows.append([f"{name}, seed {seed} (95% interval)", *cells])

    for seed in sorted({entry["seed"] for entry in runs}):
        add_with_interval("greedy, before", seed, 0)
        add_with_interval("greedy, after", seed, -1)
    num_samples = config.eval.num_sampled
    sampled = [f"eval/mean@{num_samples}", f"eval/pass@{num_samples}"] if num_samples else []
    for metric in sampled:
        name = f"{metric.removeprefix('eval/')}, %"
        add(f"{name}, before", metric_at(0, metric, 100), 1)
        add(f"{name}, after", metric_at(-1, metric, 100), 1)
    for metric in runs[0]["points"][0]:
        if metric.startswith("eval/rewards/"):
            name = f"reward {metric.removeprefix('eval/rewards/')}"
            add(f"{name}, before", metric_at(0, metric, 1), 4)
            add(f"{name}, after", metric_at(-1, metric, 1), 4)

    num_rows = config.rollout.prompts_per_step * config.rollout.num_generations

    def completion_tokens(entry: dict) -> float:
        return statistics.mean(entry["mean_length"])

    def prompt_tokens(entry: dict) -> float:
        # num_tokens counts a prompt for each of its completions.
        num_completions = num_rows * len(entry["mean_length"])
        return entry["num_tokens"] / num_completions - completion_tokens(entry)

    add("prompt tokens, mean", prompt_tokens, 1)
    add("completion tokens, mean", completion_tokens, 1)
    add("seconds a step, median", lambda entry: statistics.median(entry["step_seconds"]), 2)
    add("minutes of training", lambda entry: entry["seconds"] / 60, 1)
    add("peak RSS, MiB", lambda entry: entry["peak_rss_mib"], 0)
    return markdown(["mean (range) over seeds", *map(label, sides)], rows)


def main() -> None:
    p = parser(
        __doc__,
        trl_python=None,
        config=None,
        seeds=[0, 1, 2],
        sides=["ours", "trl"],
        every=0,
        runs=ROOT / "runs/learning_vs_trl",
        output=None,
        table_only=False,
    )
    p.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = p.parse_args()
    if options.table_only:
        options.seeds = []
    for side in options.sides:
        trainer = side.split()[0]
        if trainer not in LABELS:
            p.error(f"--sides: a side begins with ours or trl; settings of all follow --: {side}")
        if trainer == "trl" and options.seeds and options.trl_python is None:
            p.error("--trl-python: name the Python of an environment with TRL")
    options.settings = [*DEFAULT, *options.overrides]
    if options.config:
        # Runs have the checkout as working directory.
        options.config = os.path.relpath(options.config, ROOT)
        os.chdir(ROOT)
        options.settings = ["--config", options.config, *options.overrides]
    config = load_config(options.settings)
    if config.runtime.threads_per_rank is None:
        p.error("runtime.threads_per_rank is not set: our side would take all cores, TRL's one")
    steps = config.optim.max_steps
    is_own = options.config is not None or bool(options.overrides)
    name = options.output or RESULTS / "learning_vs_trl"
    if is_own and options.output is None:
        name = options.runs / Path(options.config or "changed").stem
    output = Path(f"{name}.json")
    options.every = options.every or (steps if is_own else 20)
    options.runs.mkdir(parents=True, exist_ok=True)
    of_config = {"steps": steps} | ({"settings": options.settings} if is_own else {})

    def stored() -> list[dict]:
        """The runs of these settings."""
        return [entry for entry in read_runs(output) if of_config.items() <= entry.items()]

    for seed in options.seeds:
        for side in options.sides:
            of_run = {"side": side, "seed": seed, **of_config}
            if any(of_run.items() <= entry.items() for entry in stored()):
                continue
            entry = of_run | run_side(side, seed, options, config)
            add_run(output, entry)
            accuracies = [round(point[sampled_metric(config)], 3) for point in entry["points"]]
            print(f"{side:5} seed {seed}: {accuracies}", flush=True)
    if runs := stored():
        text = table(runs, config)
        if is_own:
            text += f"\n{table_by_minute(runs, config)}"
            text += f"\n{table_of_rewards(runs)}"
            text += f"\n{table_of_figures(runs, config)}"
        output.with_suffix(".md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()

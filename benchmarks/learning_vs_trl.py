r"""Held-out accuracy by number of sampled completions, beside TRL 1.16.0: same initial model, same
problems.

    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python
        3 seeds each, then the table
    python benchmarks/learning_vs_trl.py --table-only
        the table of the stored results
    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python --config X.yaml \
        [section.key=value ...]

Settings of both: builtin:tiny, builtin:arithmetic in the order of our schedule, 8 problems x 8
completions a step, 64 tokens, temperature 1, rewards accuracy + 0.5 format, clip 0.2, beta 0,
rewards scaled by the group's std, loss averaged over responses, AdamW 2e-4 falling linearly to 0,
gradient norm 1, fp32, one CPU thread. Settings that differ from TRL's defaults (in brackets):
loss_type grpo (dapo), bf16 False (True where supported), gradient_checkpointing False (True),
steps_per_generation 1, shuffle_dataset False, adamw_torch (fused). The same code evaluates both on
the same held-out problems: 4 samples each at temperature 1, and greedily.

With --config all of these come from that file, also device and precision; the table then has the
mean of each reward before and after, too, and results go to the folder of --runs. A setting that
TRL lacks (several updates per rollout, a stop string, ...) stops the script with its name.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path

from common import RESULTS, ROOT, markdown, parser, read_runs, run, train, write_runs

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


def sampled_metric(config: Config) -> str:
    """The evaluation metric of the table: the mean over samples, or the greedy one without
    samples."""
    return f"eval/mean@{config.eval.num_sampled}" if config.eval.num_sampled else GREEDY


def run_ours(seed: int, options: argparse.Namespace) -> dict:
    output = options.runs / f"ours-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    lines = train(output, *options.settings, f"seed={seed}", f"eval.every={options.every}")
    shutil.rmtree(output)
    steps = [line for line in lines if line["step"]]
    points = []
    for line in lines:
        if GREEDY in line:
            point = {"step": line["step"]}
            for name, value in line.items():
                if name.startswith("eval/"):
                    point[name] = value
            points.append(point)
    return {
        "points": points,
        "reward_by_step": [round(line["reward"], 4) for line in steps],
        "seconds": sum(line["step_time"] for line in steps),
    }


def run_trl(seed: int, options: argparse.Namespace) -> dict:
    output = options.runs / f"trl-{seed}.json"
    run(
        Path(options.trl_python).absolute(),
        ROOT / "benchmarks/trl_side.py",
        output,
        str(options.every),
        *options.settings,
        f"seed={seed}",
    )
    found = json.loads(output.read_text())
    output.unlink()
    return found


SIDES = {"ours": ("this trainer", run_ours), "trl": ("TRL 1.16.0", run_trl)}


def table(runs: list[dict], config: Config, *, with_rewards: bool) -> str:
    """Markdown: accuracy of sampled completions by completions sampled so far, mean and range over
    seeds.

    ``with_rewards`` adds the mean of each reward before and after.
    """
    rows = []

    def add(
        label: str,
        step: int,
        metric: str,
        factor: float = 100,
        digits: int = 1,
    ) -> None:
        cells = []
        for side in SIDES:
            found = []
            for entry in runs:
                points = {point["step"]: point for point in entry["points"]}
                if entry["side"] == side and step in points:
                    found.append(factor * points[step][metric])
            spread = (
                f" ({min(found):.{digits}f} to {max(found):.{digits}f})" if len(found) > 1 else ""
            )
            cells.append(f"{statistics.mean(found):.{digits}f}{spread}" if found else "-")
        rows.append([label, *cells])

    first = runs[0]["points"][0]
    steps = [point["step"] for point in runs[0]["points"]]
    per_step = config.rollout.prompts_per_step * config.rollout.num_generations
    for step in steps:
        add(str(step * per_step), step, sampled_metric(config))
    add("greedy, at the end", steps[-1], GREEDY)
    for name in first:
        if with_rewards and name.startswith("eval/rewards/"):
            label = f"reward {name.removeprefix('eval/rewards/')}"
            add(f"{label}, before", 0, name, factor=1, digits=4)
            add(f"{label}, after", steps[-1], name, factor=1, digits=4)
    return markdown(["completions sampled", *(name for name, _ in SIDES.values())], rows)


def main() -> None:
    p = parser(
        __doc__,
        trl_python=None,
        config=None,
        seeds=[0, 1, 2],
        runs=ROOT / "runs/learning_vs_trl",
        table_only=False,
    )
    options, overrides = p.parse_known_args()
    if options.table_only:
        options.seeds = []
    elif options.trl_python is None:
        p.error("--trl-python: name the Python of an environment with TRL")
    options.settings = [*DEFAULT, *overrides]
    if options.config:
        options.settings = ["--config", str(Path(options.config).absolute()), *overrides]
    config = load_config(options.settings)
    steps = config.optim.max_steps
    is_own = options.config is not None or bool(overrides)
    output = RESULTS / "learning_vs_trl.json"
    if is_own:
        output = options.runs / f"{Path(options.config or 'changed').stem}.json"
    options.every = steps if is_own else 20
    options.runs.mkdir(parents=True, exist_ok=True)
    of_config = {"steps": steps} | ({"settings": options.settings} if is_own else {})

    runs = read_runs(output)
    mine = [entry for entry in runs if of_config.items() <= entry.items()]
    for seed in options.seeds:
        for side, (_, measure) in SIDES.items():
            of_run = {"side": side, "seed": seed, **of_config}
            if any(of_run.items() <= entry.items() for entry in mine):
                continue
            runs.append(of_run | measure(seed, options))
            mine.append(runs[-1])
            write_runs(output, runs)
            accuracies = [round(point[sampled_metric(config)], 3) for point in runs[-1]["points"]]
            print(f"{side:5} seed {seed}: {accuracies}", flush=True)
    if mine:
        text = table(mine, config, with_rewards=is_own)
        output.with_suffix(".md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()

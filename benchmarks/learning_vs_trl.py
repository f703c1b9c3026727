"""Held-out accuracy by number of sampled completions, beside TRL 1.16.0: same initial model, same problems.

    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python           3 seeds each, then the table
    python benchmarks/learning_vs_trl.py --table-only                                of the stored results
    python benchmarks/learning_vs_trl.py --trl-python .venv-trl/bin/python --config X.yaml [section.key=value ...]

Settings of both: builtin:tiny, builtin:arithmetic in the order of our schedule, 8 problems x 8 completions a step, 64
tokens, temperature 1, rewards accuracy + 0.5 format, clip 0.2, beta 0, rewards scaled by the group's std, loss averaged
over responses, AdamW 2e-4 falling linearly to 0, gradient norm 1, fp32, one CPU thread. Settings that differ from TRL's
defaults (in brackets): loss_type grpo (dapo), bf16 False (True where supported), gradient_checkpointing False (True),
steps_per_generation 1, shuffle_dataset False, adamw_torch (fused). The same code evaluates both on the same held-out
problems: 4 samples each at temperature 1, and greedily.

With --config all of these come from that file, also device and precision; the table then has the mean of each reward
before and after, too, and results go to the folder of --runs. A setting that TRL lacks (several updates per rollout, a
stop string, ...) stops the script with its name.
"""

import json
import shutil
import statistics
import subprocess
from pathlib import Path

from common import RESULTS, ROOT, parser, read_runs, train, write_runs

from grpo.config import Config, load_config

SIDES = {"ours": "this trainer", "trl": "TRL 1.16.0"}
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
    """The evaluation metric of the table: the mean over samples, or the greedy one without samples."""
    return f"eval/mean@{config.eval.num_sampled}" if config.eval.num_sampled else GREEDY


def run_ours(
    settings: list[str],
    seed: int,
    every: int,
    folder: Path,
) -> dict:
    output = folder / f"ours-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    lines = train(output, *settings, f"seed={seed}", f"eval.every={every}")
    shutil.rmtree(output)
    return {
        "points": [{k: v for k, v in x.items() if k == "step" or k.startswith("eval/")} for x in lines if GREEDY in x],
        "reward_by_step": [round(x["reward"], 4) for x in lines if x["step"]],
        "seconds": sum(x["step_time"] for x in lines if x["step"]),
    }


def run_trl(
    settings: list[str],
    seed: int,
    every: int,
    folder: Path,
    python: Path,
) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"trl-{seed}.json"
    command = [
        str(python),
        str(ROOT / "benchmarks/trl_side.py"),
        str(output),
        str(every),
        *settings,
        f"seed={seed}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(output.read_text())
    output.unlink()
    return found


def values(
    runs: list[dict],
    side: str,
    step: int,
    metric: str,
    factor: float = 100,
) -> list[float]:
    return [factor * p[metric] for r in runs if r["side"] == side for p in r["points"] if p["step"] == step]


def table(runs: list[dict], config: Config, *, with_rewards: bool) -> str:
    """Markdown: accuracy of sampled completions by completions sampled so far, mean and range over seeds.

    ``with_rewards`` adds the mean of each reward before and after.
    """

    def row(
        label: str,
        step: int,
        metric: str,
        factor: float = 100,
        digits: int = 1,
    ) -> str:
        cells = []
        for side in SIDES:
            found = values(runs, side, step, metric, factor)
            spread = f" ({min(found):.{digits}f} to {max(found):.{digits}f})" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.{digits}f}{spread}" if found else "-")
        return f"| {label} | {' | '.join(cells)} |"

    steps = [point["step"] for point in runs[0]["points"]]
    per_step = config.rollout.prompts_per_step * config.rollout.num_generations
    rows = ["| completions sampled | " + " | ".join(SIDES.values()) + " |", "|---|---|---|"]
    rows += [row(str(step * per_step), step, sampled_metric(config)) for step in steps]
    rows.append(row("greedy, at the end", steps[-1], GREEDY))
    names = [name for name in runs[0]["points"][0] if name.startswith("eval/rewards/")] if with_rewards else []
    for name in names:
        for step, when in ((0, "before"), (steps[-1], "after")):
            rows.append(row(f"reward {name.removeprefix('eval/rewards/')}, {when}", step, name, 1, 4))
    return "\n".join(rows) + "\n"


def main() -> None:
    p = parser(
        __doc__,
        trl_python=None,
        config=None,
        every=0,
        seeds=[0, 1, 2],
        output=None,
        runs=ROOT / "runs/learning_vs_trl",
        table_only=False,
    )
    options, overrides = p.parse_known_args()
    settings = [*DEFAULT, *overrides]
    if options.config:
        settings = ["--config", str(Path(options.config).absolute()), *overrides]
    config = load_config(settings)
    steps = config.optim.max_steps
    if not options.table_only and options.trl_python is None:
        p.error("--trl-python: name the Python of an environment with TRL")
    is_own = options.config is not None or bool(overrides)
    name = Path(options.config).stem if options.config else "changed"
    default = options.runs / f"{name}.json" if is_own else RESULTS / "learning_vs_trl.json"
    output = Path(options.output or default)
    runs = read_runs(output)
    every = options.every or (steps if is_own else 20)

    def mine() -> list[dict]:
        return [r for r in runs if r["steps"] == steps and r.get("settings", settings) == settings]

    for seed in options.seeds if not options.table_only else []:
        for side in SIDES:
            if any((r["side"], r["seed"]) == (side, seed) for r in mine()):
                continue
            arguments = (settings, seed, every, options.runs)
            found = run_ours(*arguments) if side == "ours" else run_trl(*arguments, Path(options.trl_python).absolute())
            of_config = {"settings": settings} if is_own else {}
            runs.append({"side": side, "seed": seed, "steps": steps, **of_config, **found})
            write_runs(output, runs)
            print(f"{side:5} seed {seed}: {[round(p[sampled_metric(config)], 3) for p in found['points']]}", flush=True)
    if shown := mine():
        text = table(shown, config, with_rewards=is_own)
        output.with_suffix(".md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()

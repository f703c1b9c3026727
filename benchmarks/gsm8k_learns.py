"""GSM8K with a small checkpoint: rewards by step, and the test problems before and after, for
several seeds.

    python benchmarks/gsm8k_learns.py --model FOLDER --train train.jsonl --test test.jsonl
        3 seeds x 30 steps
    python benchmarks/gsm8k_learns.py --table-only
        table of the stored results

The configuration is configs/gsm8k_cpu.yaml. `python -m grpo.evaluation` evaluates on the first test
problems: greedily, and with 4 samples each at temperature 1. All models answer the same problems
with the same random numbers. Each result is written to benchmarks/results/gsm8k_learns.json at once
(a stored run is not repeated), and from there to .md.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from common import RESULTS, ROOT, markdown, parser, run
from common import train as run_trainer

CONFIG = [
    "--config",
    str(ROOT / "configs/gsm8k_cpu.yaml"),
    "runtime.device=cpu",
    "runtime.threads_per_rank=1",
]
CURVES = (
    "rewards/format/mean",
    "rewards/accuracy/mean",
    "completions/mean_length",
    "completions/clipped_ratio",
)
BEFORE = "before"


def train(seed: int, options: argparse.Namespace, output: Path) -> dict[str, list[float]]:
    """One training run without evaluation; its metrics by step."""
    shutil.rmtree(output, ignore_errors=True)
    lines = run_trainer(
        output,
        *CONFIG,
        f"model.name_or_path={options.model}",
        f"data.dataset={options.train}",
        "data.eval_split=null",
        f"seed={seed}",
        f"optim.max_steps={options.steps}",
    )
    # Step 0 is the evaluation before training.
    steps = [line for line in lines if line["step"]]
    curves = {}
    for name in CURVES:
        curves[name] = [round(line[name], 4) for line in steps]
    return curves


def evaluate(model: str | Path, options: argparse.Namespace, output: Path) -> dict[str, dict]:
    """Value, interval and count of each metric, from ``python -m grpo.evaluation``."""
    run(
        sys.executable,
        "-m",
        "grpo.evaluation",
        *CONFIG,
        "--model",
        model,
        "--output",
        output,
        f"data.dataset={options.train}",
        f"data.eval_dataset={options.test}",
        "data.eval_split=train",
        f"eval.max_samples={options.problems}",
        "eval.num_samples=4",
        "eval.temperature=1.0",
    )
    evaluation = json.loads(output.read_text())
    return evaluation["models"][0]["metrics"]


def table(evaluations: dict[str, dict]) -> str:
    """Each metric before training and after, by seed, with its 95% interval."""
    columns = sorted(evaluations)  # "before", "seed 0", ...
    rows = []
    for metric in evaluations[BEFORE]:
        if "/rewards/" in metric:  # the same as format and mean@4
            continue
        factor = 1 if metric.endswith("length") else 100
        cells = []
        for column in columns:
            value, low, high = (
                factor * evaluations[column][metric][x] for x in ("value", "low", "high")
            )
            cells.append(f"{value:.1f} ({low:.1f} to {high:.1f})")
        rows.append([metric.removeprefix("eval/").replace("_", " "), *cells])
    return markdown(["", *columns], rows)


def main() -> None:
    p = parser(
        __doc__,
        model=None,
        train=None,
        test=None,
        steps=30,
        seeds=[0, 1, 2],
        problems=512,
        output=RESULTS / "gsm8k_learns.json",
        table_only=False,
    )
    options = p.parse_args()
    if options.table_only:
        options.seeds = []
    elif not (options.model and options.train and options.test):
        p.error("--model, --train and --test name the checkpoint and the two files")
    folder = ROOT / "runs/gsm8k_learns"
    results = {
        "steps": options.steps,
        "problems": options.problems,
        "runs": {},
        "evaluations": {},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.output.exists():
        results = json.loads(options.output.read_text())
    for seed in options.seeds:
        name = f"seed {seed}"
        output = folder / str(seed)
        if name not in results["runs"]:
            results["runs"][name] = train(seed, options, output)
        models = {BEFORE: options.model, name: output / f"checkpoint-{options.steps}"}
        for column, model in models.items():
            if column not in results["evaluations"]:
                results["evaluations"][column] = evaluate(model, options, folder / f"{column}.json")
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results["evaluations"])
    options.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

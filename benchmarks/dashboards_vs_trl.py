"""The names under which TRL's GRPOTrainer and this trainer show the same task in wandb and TensorBoard.

    python benchmarks/dashboards_vs_trl.py --trl-python TRLVENV/bin/python --output FOLDER [key=value ...]

Both sides train the demo's model for a few steps, write TensorBoard's event files and wandb's offline files, and draw other samples from
the same distribution. Ours has ``logging.wandb_prefix=train/``. The names and x axes are read back from the files of both. Afterwards
``tensorboard --logdir FOLDER`` shows both runs in the same charts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]
SETTINGS = [
    "--config=configs/tiny_arithmetic.yaml", "rollout.prompts_per_step=4", "rollout.num_generations=8", "optim.max_steps=8",
    "algorithm.beta=0.04", "eval.max_samples=32", "eval.num_samples=1", "eval.temperature=0", "eval.every=4",
]  # fmt: skip


def train_trl(folder: Path, arguments: list[str]) -> None:
    """TRL's run, in TRL's Python: its own defaults, except for sizes, loss, learning rate and what switches the dashboards on."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl_side import reward_functions

    from grpo.config import load_config
    from grpo.data import load_rows, make_problems
    from grpo.model import load_tokenizer, resolve_model

    config = load_config(arguments)
    path = resolve_model(config.model.name_or_path, config.data.dataset)
    tokenizer = load_tokenizer(path)

    def rows(train: bool) -> Dataset:
        problems = make_problems(load_rows(config.data, train=train, seed=config.seed), config.data, tokenizer).problems
        return Dataset.from_list([{"prompt": [{"role": "user", "content": p.prompt}], **p.columns} for p in problems])

    r = config.rollout
    options = GRPOConfig(
        output_dir=str(folder), report_to=["wandb", "tensorboard"], run_name="TRL", logging_steps=config.logging.every, use_cpu=True, bf16=False,
        loss_type="grpo", reward_weights=[function.weight for function in config.reward.functions],
        max_steps=config.optim.max_steps, learning_rate=config.optim.learning_rate, beta=config.algorithm.beta,
        per_device_train_batch_size=r.prompts_per_step * r.num_generations, num_generations=r.num_generations,
        max_completion_length=r.max_completion_length, save_strategy="no", eval_strategy="steps", eval_steps=config.eval.every,
        per_device_eval_batch_size=config.eval.max_samples, num_generations_eval=1, disable_tqdm=True,
    )  # fmt: skip
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=options,
        reward_funcs=reward_functions(config),
        train_dataset=rows(train=True),
        eval_dataset=rows(train=False).select(range(config.eval.max_samples)),
        processing_class=tokenizer,
    ).train()


def tensorboard_points(folder: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value, of the event files anywhere under a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        reader = EventAccumulator(str(file.parent))
        reader.Reload()
        for name in reader.Tags()["scalars"]:
            found[name] = {event.step: event.value for event in reader.Scalars(name)}
    return found


def wandb_points(folder: Path) -> tuple[set[str], dict[str, dict[int, float]]]:
    """The x axis of all charts, and name -> x -> value, of wandb's offline file under a folder."""
    from wandb_files import wandb_records

    axes, lines, points = set(), [], {}
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "metric" and record.metric.glob_name == "*":
            axes.add(record.metric.step_metric)
        elif record.WhichOneof("record_type") == "history":
            lines.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    for line in lines:
        for name, value in line.items():
            if isinstance(value, (int, float)) and name.startswith(("train/", "eval/")):
                points.setdefault(name, {})[line[next(iter(axes))]] = value
    return axes, points


def table(ours: dict[str, dict[int, float]], trl: dict[str, dict[int, float]]) -> str:
    """The names in TensorBoard, without the prefix: of both sides with the same steps, of TRL alone, of this trainer alone."""
    shared = {name for name in ours.keys() & trl.keys() if ours[name].keys() == trl[name].keys()}
    groups = {
        "both, with the same steps": shared,
        "TRL alone": trl.keys() - shared,
        "this trainer alone": ours.keys() - shared,
    }
    listed = {
        group: ", ".join(f"`{name.removeprefix('train/')}`" for name in sorted(names))
        for group, names in groups.items()
    }
    rows = [f"| {group} | {names} |" for group, names in listed.items()]
    return "\n".join(["| shown by | names |", "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--trl-side", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    a = parser.parse_args()
    ours, trl = a.output.resolve() / "ours", a.output.resolve() / "trl"
    arguments = [*SETTINGS, *a.overrides]
    if a.trl_side:
        train_trl(trl, arguments)
        return
    trl.mkdir(parents=True)
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(trl)}
    dashboards = [
        "logging.wandb=offline",
        "logging.tensorboard=true",
        "logging.wandb_prefix=train/",
        f"output_dir={ours}",
    ]
    subprocess.run([sys.executable, "train_grpo.py", *arguments, *dashboards], cwd=ROOT, check=True)
    command = [a.trl_python, __file__, *sys.argv[1:], "--trl-side"]
    subprocess.run(command, env=environment, check=True)
    sides = [tensorboard_points(folder) for folder in (ours, trl)]
    print(table(*sides))
    for folder, in_tensorboard in zip((ours, trl), sides, strict=True):
        axes, in_wandb = wandb_points(folder)
        x = ", ".join(f"{step:g}" for step in in_wandb["train/reward"])
        missing = ", ".join(sorted(in_tensorboard.keys() - in_wandb.keys())) or "none"
        print(f"wandb, {folder.name}: train/reward at {', '.join(axes)} {x}; without TensorBoard's names {missing}")


if __name__ == "__main__":
    main()

"""Shared by the benchmarks: runs of the trainer, ratios, files of results. Puts the checkout on the
path."""

import argparse
import fcntl
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACES = {"model", "data", "output", "server", "trl_python", "measure"}
"""Options that are not recorded."""
LOSS_TYPES = {"response_mean": "grpo", "constant": "dr_grpo", "token_mean": "dapo"}
"""``algorithm.aggregation`` -> TRL's name of the same average."""
sys.path.insert(0, str(ROOT))


def parser(description: str, **defaults) -> argparse.ArgumentParser:
    """Options by their defaults, whose types they have. None: text, nothing by default."""
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            p.add_argument(option, action="store_true")
        elif isinstance(default, list):
            p.add_argument(option, type=type(default[0]), default=default, nargs="+")
        else:
            p.add_argument(option, type=str if default is None else type(default), default=default)
    return p


def run(*command: str | Path) -> str:
    """Run a command in the checkout. Returns what it printed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def train(
    output: Path,
    *arguments: str,
    ranks: int = 1,
    script: Path = ROOT / "train_grpo.py",
) -> list[dict]:
    """Run the trainer in processes of its own. The lines of its ``metrics.jsonl``."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
    ]
    run(
        sys.executable,
        *(torchrun if ranks > 1 else []),
        script,
        *arguments,
        f"output_dir={output}",
        "logging.every=1000",
        "logging.log_completions=0",
    )
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def ratios(numerators: list[float], denominators: list[float]) -> dict[str, float]:
    """The median, the lowest and the highest ratio of pairs that were measured in turn."""
    values = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return {
        "ratio": statistics.median(values),
        "least": min(values),
        "greatest": max(values),
    }


def shown(found: dict[str, float]) -> str:
    """The result of :func:`ratios` in a line."""
    ratio = f"{found['ratio']:.2f}"
    if found["least"] == found["greatest"]:
        return ratio
    return f"{ratio} ({found['least']:.2f} to {found['greatest']:.2f})"


def in_turn(sides, number: int) -> list:
    """The sides, in the other order every second time."""
    return list(sides) if number % 2 == 0 else list(reversed(sides))


def about(options: argparse.Namespace, **more) -> dict:
    """Date, machine and options, for a file of results."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = re.search("model name.*: (.*)|$", text)[1] or platform.processor()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{name}, {os.cpu_count()} cores",
        "arguments": {key: value for key, value in vars(options).items() if key not in PLACES},
        **more,
    }


def markdown(columns: list[str], rows: list[list]) -> str:
    """A table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines).replace("|  |", "| |") + "\n"


def write(path: str | None, results: dict, table: str = "") -> None:
    """``path.json``, and ``path.md``: the table below what ``results`` says about machine and
    arguments."""
    if path is None:
        return
    Path(f"{path}.json").write_text(json.dumps(results, indent=1) + "\n")
    if table:
        words = {key: value for key, value in results.items() if not isinstance(value, list)}
        Path(f"{path}.md").write_text(f"{json.dumps(words)}\n\n{table}")


def read_runs(path: Path) -> list[dict]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return []
    return json.loads(path.read_text())


def write_runs(path: Path, runs: list[dict]) -> None:
    """One line per run. The file is replaced at once, so a kill loses no run."""
    written = path.with_suffix(".writing")
    written.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    written.replace(path)


def add_run(path: Path, entry: dict) -> None:
    """Add a run to a file to which other processes may add runs meanwhile."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_runs(path, [*read_runs(path), entry])


def reset_peak_rss() -> None:
    """Let :func:`peak_rss_mib` begin anew. Only Linux can."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss_mib() -> float:
    """Peak of this process's resident memory since the last reset, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def versions(python: str | Path) -> dict:
    """Versions of torch, transformers and TRL in an environment."""
    code = (
        "import json, importlib.metadata as m; wanted = ('torch', 'transformers', 'trl'); "
        "print(json.dumps({d.name: d.version for d in m.distributions() if d.name in wanted}))"
    )
    return json.loads(run(python, "-c", code))


def microbatches_of_trl(setting: str, num_rows: int) -> dict:
    """TRL's arguments for a setting as ``8+checkpointing``: rows of a micro-batch of the
    ``num_rows`` of a step, and options."""
    rows, *options = setting.split("+")
    return {
        "per_device_train_batch_size": int(rows),
        "gradient_accumulation_steps": num_rows // int(rows),
        "gradient_checkpointing": "checkpointing" in options,
    }


def trl_trainer(
    model: str,
    rows: list[dict],
    rewards,
    folder: str,
    *,
    cls=None,
    dtype="float32",
    tokenizer=None,
    callbacks=(),
    **settings,
):
    """TRL's GRPOTrainer (``cls``: a subclass) on these rows, which reports and saves nothing."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    quiet = dict(report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True)
    return (cls or GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa"),
        args=GRPOConfig(output_dir=folder, **quiet, **settings),
        reward_funcs=rewards,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer or AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=list(callbacks),
    )

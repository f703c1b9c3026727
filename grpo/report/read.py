"""Reads the folder of a run, also while the run goes on."""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo.config import flat
from grpo.telemetry.console import is_rate, without_most_pass_at_k
from grpo.telemetry.records import read_starts, read_steps
from grpo.telemetry.samples import read_samples


@dataclass
class RunData:
    """The files of one run."""

    name: str
    metrics: list[dict[str, Any]]
    """One object per step, in order, each step once; values are finite numbers or None."""
    intervals: dict[int, dict[str, Any]]
    """Step -> metric -> ``[low, high]``, as the evaluation computed them."""
    config: dict[str, Any]
    """Dotted key -> value."""
    starts: list[dict[str, Any]]
    """See ``grpo.telemetry.records``."""
    samples: list[dict[str, Any]]
    """Records of ``grpo.telemetry.samples``, by step."""
    is_complete: bool
    notes: list[str] = field(default_factory=list)
    """Notes on data that could not be read or was left out; shown in the report."""


def read_run(folder: str | Path, *, max_samples: int = 400) -> RunData:
    """Read a run; of more than ``max_samples`` completions, those of every n-th step; 0: none."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        raise ValueError(f"{folder} is not a run: it has neither metrics.jsonl nor config.yaml")
    notes: list[str] = []
    lines = _by_step(folder / "metrics.jsonl")
    metrics = [{name: _finite_or_none(value) for name, value in line.items()} for line in lines.values()]
    config = _read_config(folder / "config.yaml", notes)
    samples = _read_completions(folder / "completions", max_samples, notes)
    name = str(config.get("logging.run_name") or folder.resolve().name)
    is_complete = _has_last_step(metrics, config) and (folder / f"checkpoint-{metrics[-1]['step']}").is_dir()
    if not metrics:
        notes.append("No step has been written yet.")
    intervals = _by_step(folder / "intervals.jsonl")
    return RunData(name, metrics, intervals, config, read_starts(folder), samples, is_complete, notes)


def _has_last_step(metrics: list[dict[str, Any]], config: dict[str, Any]) -> bool:
    """True if the newest step is the last by ``optim.max_steps`` or ``optim.num_epochs``."""
    last = metrics[-1] if metrics else {}
    for done, total in ("step", "optim.max_steps"), ("epoch", "optim.num_epochs"):
        if config.get(total):
            return (last.get(done) or 0) >= config[total] - 1e-9  # an epoch is a sum of fractions
    return bool(metrics)


def _by_step(path: Path) -> dict[int, dict[str, Any]]:
    """The objects of a file by their step, in order. If a step comes twice, the later line counts."""
    return dict(sorted({line["step"]: line for line in read_steps(path)}.items()))


def _finite_or_none(value: Any) -> float | None:
    is_number = type(value) in (int, float)  # True and False are no numbers
    return value if is_number and abs(value) <= sys.float_info.max else None  # false for NaN too


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_bytes()) or {}
        values.pop("given", None)
        return flat(values)
    except (OSError, ValueError, yaml.YAMLError):
        notes.append("config.yaml could not be read.")
        return {}


def _read_completions(folder: Path, max_samples: int, notes: list[str]) -> list[dict[str, Any]]:
    paths, records = sorted(folder.glob("step_*.parquet")) if max_samples else [], []
    per_step = len(_read_samples(paths[-1], [])) if paths else 0
    kept = every_nth(paths, max(math.ceil(len(paths) * per_step / (max_samples or 1)), 1))
    for path in kept:
        records += _read_samples(path, notes)
    if len(kept) < len(paths):
        notes.append(f"Completions of {len(kept)} of {len(paths)} steps are shown; --max-samples shows more.")
    return records


def _read_samples(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        return read_samples(path)
    except (OSError, ValueError):  # pyarrow's errors inherit from one of the two
        notes.append(f"completions/{path.name} could not be read.")
        return []


def every_nth(items: list[Any], n: int) -> list[Any]:
    """The first item, each n-th after it, and the last."""
    return items[::n] + (items[-1:] if (len(items) - 1) % n else [])


def evaluations(run: RunData) -> list[dict[str, Any]]:
    """The steps that have an evaluation."""
    return [line for line in run.metrics if any(name.startswith("eval/") for name in line)]


def evaluation_names(run: RunData) -> list[str]:
    """The evaluation metrics that the report shows."""
    names = dict.fromkeys(name for line in evaluations(run) for name in line if name.startswith("eval/"))
    return without_most_pass_at_k(names)


def before_and_after(run: RunData) -> list[dict[str, Any]]:
    """``{name, is_rate, before, after}`` of each evaluation metric; sides are ``{step, value, low, high}`` or None.

    ``before`` is the evaluation of step 0, before training. ``low`` and ``high`` are the 95% interval, or None.
    """
    found = evaluations(run)
    first = found[0] if found and found[0]["step"] == 0 else None
    last = found[-1] if found and found[-1] is not first else None

    def side(line: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
        if line is None or line.get(name) is None:
            return None
        low, high = run.intervals.get(line["step"], {}).get(name, (None, None))
        return {"step": line["step"], "value": line[name], "low": low, "high": high}

    names = evaluation_names(run)
    return [dict(name=name, is_rate=is_rate(name), before=side(first, name), after=side(last, name)) for name in names]


def reward_before_and_after(run: RunData, most: int = 10) -> dict[str, Any] | None:
    """A row as of :func:`before_and_after`: the mean reward of the first and of the last steps, ``most`` at most."""
    steps = [line for line in run.metrics if line.get("reward") is not None]
    count = min(most, len(steps) // 2)
    if count == 0:
        return None

    def side(lines: list[dict[str, Any]]) -> dict[str, Any]:
        mean = sum(line["reward"] for line in lines) / count
        return {"first": lines[0]["step"], "step": lines[-1]["step"], "value": mean, "low": None, "high": None}

    label = f"reward, mean of {count} steps"
    sides = {"before": side(steps[:count]), "after": side(steps[-count:])}
    return {"name": "reward", "label": label, "is_rate": False, **sides}


def evaluation_settings(run: RunData) -> dict[str, Any]:
    """The settings on which the numbers of an evaluation depend besides the model, rewards and seed."""
    config, count = run.config, run.starts[-1].get("num_eval_problems") if run.starts else None
    unused = "data.dataset" if config.get("data.eval_dataset") else "data.eval_dataset"
    ignored = (unused, "eval.every", "eval.before", "eval.max_s", "data.max_eval", "data.max_train", "data.train")
    used = [key for key in config if key.startswith(("eval.", "data.", "rollout.stop")) and not key.startswith(ignored)]
    limit = config.get("eval.max_completion_length") or config.get("rollout.max_completion_length")
    return {key: config[key] for key in used} | {"eval.max_completion_length": limit, "number of problems": count}

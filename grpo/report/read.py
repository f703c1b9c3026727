"""Reads the folder of a run, also while the run goes on: half a last line, damaged files and missing values are not errors."""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo.system import open_regular
from grpo.telemetry.console import is_rate, without_most_pass_at_k
from grpo.telemetry.environment import read_starts
from grpo.telemetry.intervals import wilson
from grpo.telemetry.samples import count_samples, read_samples


@dataclass
class RunData:
    """The files of one run."""

    name: str
    metrics: list[dict[str, Any]]
    """One object per step, in order, each step once; values are finite numbers or None."""
    intervals: dict[int, dict[str, Any]]
    """Step -> metric -> ``[low, high]``, as the evaluation computed them; empty for a run without ``intervals.jsonl``."""
    config: dict[str, Any]
    """Dotted key -> value."""
    starts: list[dict[str, Any]]
    """See ``grpo.telemetry.environment``."""
    samples: list[dict[str, Any]]
    """Records of ``grpo.telemetry.samples``, by step."""
    is_complete: bool
    notes: list[str] = field(default_factory=list)
    """Notes on data that could not be read or was left out; shown in the report."""


def read_run(folder: str | Path, *, max_samples: int = 400) -> RunData:
    """Read a run; of more than ``max_samples`` completions, those of every n-th step. Another folder is a ``ValueError``."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if not any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        raise ValueError(f"{folder} is not a run: it has neither metrics.jsonl nor config.yaml")
    notes: list[str] = []
    lines = _read_steps(folder / "metrics.jsonl", notes)
    metrics = [{name: _finite_or_none(value) for name, value in line.items()} for line in lines.values()]
    config = _read_config(folder / "config.yaml", notes)
    samples = _read_completions(folder / "completions", max_samples, notes)
    name = str(config.get("logging.run_name") or folder.resolve().name)
    is_complete = _has_last_step(metrics, config) and (folder / f"checkpoint-{metrics[-1]['step']}").is_dir()
    if not metrics:
        notes.append("No step has been written yet.")
    intervals = _read_steps(folder / "intervals.jsonl", notes)
    return RunData(name, metrics, intervals, config, read_starts(folder), samples, is_complete, notes)


def _has_last_step(metrics: list[dict[str, Any]], config: dict[str, Any]) -> bool:
    """True if the newest step is the last of the run by ``optim.max_steps`` or ``optim.num_epochs``; without both, any step may be."""
    last = metrics[-1] if metrics else {}
    for done, total in ("step", "optim.max_steps"), ("epoch", "optim.num_epochs"):
        if _finite_or_none(config.get(total)):
            return (last.get(done) or 0) >= config[total] - 1e-9  # an epoch is a sum of fractions
    return bool(metrics)


def _read_steps(path: Path, notes: list[str]) -> dict[int, dict[str, Any]]:
    """Step -> object of a file with one JSON object per line, in the order of steps. If a step comes twice, the later line counts."""
    try:
        with open_regular(path) as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return {}
    steps: dict[int, dict[str, Any]] = {}
    lines, damaged = text.split("\n"), 0
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
            steps[int(record["step"])] = dict(record)
        except (
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
        ):  # not JSON, or not an object with a step
            damaged += line is not lines[-1]  # the last line has no line break: it may be half written
    if damaged:
        notes.append(f"{damaged} line(s) of {path.name} could not be read.")
    return dict(sorted(steps.items()))


def _finite_or_none(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) <= sys.float_info.max else None  # false for NaN too


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            return dict(flat(yaml.safe_load(file)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        notes.append("config.yaml could not be read.")
        return {}


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of nested dictionaries."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value


def _read_completions(folder: Path, max_samples: int, notes: list[str]) -> list[dict[str, Any]]:
    counts, records, damaged = {}, [], 0
    for path in sorted(folder.glob("step_*.parquet")):
        try:
            counts[path] = count_samples(path)
        except (OSError, ValueError):
            damaged += 1
    stride = math.ceil(sum(counts.values()) / max_samples) if max_samples else len(counts) + 1
    kept = every_nth(list(counts), max(stride, 1))
    for path in kept:
        try:
            records += read_samples(path)
        except (OSError, ValueError, KeyError):
            damaged += 1
    if damaged:
        notes.append(f"{damaged} file(s) of completions could not be read.")
    if len(kept) < len(counts):
        notes.append(f"Completions of {len(kept)} of {len(counts)} steps are shown; --max-samples shows more.")
    return records


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
    """``{name, is_rate, before, after}`` of each evaluation metric; ``before`` and ``after`` are ``{step, value, low, high}`` or None.

    ``before`` is the evaluation of step 0, before training. ``low`` and ``high`` are the interval (see :func:`_interval`), or None.
    """
    found = evaluations(run)
    first = found[0] if found and found[0]["step"] == 0 else None
    last = found[-1] if found and found[-1] is not first else None

    def side(line: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
        if line is None or line.get(name) is None:
            return None
        low, high = _interval(run, line, name)
        return {"step": line["step"], "value": line[name], "low": low, "high": high}

    names = evaluation_names(run)
    return [dict(name=name, is_rate=is_rate(name), before=side(first, name), after=side(last, name)) for name in names]


def reward_before_and_after(run: RunData, most: int = 10) -> dict[str, Any] | None:
    """A row as of :func:`before_and_after`: the mean reward of the first steps and of the last, at most ``most`` of each; None for one step."""
    steps = [line for line in run.metrics if line.get("reward") is not None]
    count = min(most, len(steps) // 2)
    if count == 0:
        return None

    def side(lines: list[dict[str, Any]]) -> dict[str, Any]:
        mean = sum(line["reward"] for line in lines) / count
        return {"first": lines[0]["step"], "step": lines[-1]["step"], "value": mean, "low": None, "high": None}

    label = f"reward, mean of {count} steps"
    return {
        "name": "reward",
        "label": label,
        "is_rate": False,
        "before": side(steps[:count]),
        "after": side(steps[-count:]),
    }


def _interval(run: RunData, line: dict[str, Any], name: str) -> tuple[float | None, float | None]:
    """The 95% interval that the evaluation computed.

    For a run without ``intervals.jsonl``: Wilson's interval with one observation per problem, if ``run.json`` has their number. For
    rates over several samples per problem this interval is too wide, because it takes each problem as one observation.
    """
    interval = run.intervals.get(line["step"], {}).get(name)
    if isinstance(interval, list) and len(interval) == 2:
        return _finite_or_none(interval[0]), _finite_or_none(interval[1])
    problems = next((s["num_eval_problems"] for s in reversed(run.starts) if s.get("num_eval_problems")), 0)
    if not (is_rate(name) and 0 <= line[name] <= 1 and isinstance(problems, int) and problems > 0):
        return None, None
    return wilson(line[name], problems)

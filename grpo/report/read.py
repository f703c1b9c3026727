"""A run's folder as it lies there, while the run goes on too: a torn last line, damaged files and missing values are no errors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo.telemetry.environment import read_starts
from grpo.telemetry.samples import read_samples


@dataclass
class RunData:
    """One run as read."""

    name: str
    metrics: list[dict[str, Any]]
    """One object a step, in order, each step once; numbers are finite or None."""
    config: dict[str, Any]
    """Dotted key -> value."""
    starts: list[dict[str, Any]]
    """See ``grpo.telemetry.environment``."""
    samples: list[dict[str, Any]]
    """Records of ``grpo.telemetry.samples``, by step."""
    is_complete: bool
    notes: list[str] = field(default_factory=list)
    """What could not be read or was left out, for the reader of the report."""


def read_run(folder: str | Path, *, max_samples: int = 400) -> RunData:
    """Read what is there.

    Args:
        max_samples: completions to take at most; of more, whole steps are left out evenly.

    Raises:
        ValueError: if the folder is no run at all.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if not any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        raise ValueError(f"{folder} is not a run: it has neither metrics.jsonl nor config.yaml")
    notes: list[str] = []
    metrics = _read_metrics(folder / "metrics.jsonl", notes)
    config = _read_config(folder / "config.yaml", notes)
    samples = _read_completions(folder / "completions", max_samples, notes)
    name = config.get("logging.run_name") or folder.resolve().name
    is_complete = bool(metrics) and (folder / f"checkpoint-{metrics[-1]['step']}").is_dir()
    if not metrics:
        notes.append("No step has been written yet.")
    return RunData(str(name), metrics, config, read_starts(folder), samples, is_complete, notes)


def _read_metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    *lines, last = text.split("\n")  # a line that is being written has no end yet
    damaged = 0
    for line in [*lines, last]:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            steps[int(record["step"])] = {name: _clean(value) for name, value in record.items()}
        except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, or no object with a step
            damaged += line is not last
    if damaged:
        notes.append(f"{damaged} line(s) of metrics.jsonl could not be read.")
    return [steps[step] for step in sorted(steps)]


def _clean(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return dict(_flat(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, yaml.YAMLError):
        notes.append("config.yaml could not be read.")
        return {}


def _flat(value: Any, prefix: str = ""):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value


def _read_completions(folder: Path, max_samples: int, notes: list[str]) -> list[dict[str, Any]]:
    files, records, damaged = sorted(folder.glob("step_*.parquet")), [], 0
    if not files:
        return []
    by_file = []
    for path in files:
        try:
            by_file.append(read_samples(path))
        except (OSError, ValueError, KeyError):
            damaged += 1
    if damaged:
        notes.append(f"{damaged} file(s) of completions could not be read.")
    total = sum(map(len, by_file))
    stride = math.ceil(total / max_samples) if max_samples else len(by_file) + 1
    kept = by_file[:: max(stride, 1)]
    if by_file and by_file[-1] is not kept[-1]:
        kept.append(by_file[-1])
    if len(kept) < len(by_file):
        notes.append(f"Completions of {len(kept)} of {len(by_file)} steps are shown; --max-samples takes more.")
    for rows in kept:
        records += rows
    return records


def wilson(rate: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """95% interval of a rate over ``count`` independent things (Wilson, 1927).

    For rates that are means of values in [0, 1] per problem (mean@k, pass@k) it is at least as wide as it need be: no such
    value varies more than one that is 0 or 1.
    """
    if count < 1:
        return math.nan, math.nan
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(max(rate * (1 - rate), 0.0) / count + z * z / (4 * count * count))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def evaluations(run: RunData) -> list[dict[str, Any]]:
    """Steps that have an evaluation."""
    return [line for line in run.metrics if any(name.startswith("eval/") for name in line)]


def before_and_after(run: RunData) -> list[dict[str, Any]]:
    """``{name, is_rate, before, after}`` for each metric of the evaluations; each side ``{step, value, low, high}`` or None.

    ``before`` is the evaluation of step 0; intervals need the number of problems, which ``run.json`` has.
    """
    found = evaluations(run)
    if not found:
        return []
    count = next((s["num_eval_problems"] for s in reversed(run.starts) if s.get("num_eval_problems")), 0)

    def side(line: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
        value = None if line is None else line.get(name)
        if value is None:
            return None
        has_interval = is_rate(name) and 0 <= value <= 1 and isinstance(count, int) and count > 0
        low, high = wilson(value, count) if has_interval else (None, None)
        return {"step": line["step"], "value": value, "low": low, "high": high}

    first = found[0] if found[0]["step"] == 0 else None
    last = found[-1] if found[-1] is not first else None
    return [
        {"name": name, "is_rate": is_rate(name), "before": side(first, name), "after": side(last, name)}
        for name in evaluation_names(found)
    ]


def evaluation_names(found: Sequence[dict[str, Any]]) -> list[str]:
    """Metrics of evaluations in their order; of pass@k the powers of two and the last."""
    names = dict.fromkeys(name for line in found for name in line if name.startswith("eval/"))
    ks = {name: int(k) for name in names if (k := name.removeprefix("eval/pass@")).isdecimal()}
    return [name for name in names if name not in ks or not ks[name] & (ks[name] - 1) or ks[name] == max(ks.values())]


def is_rate(name: str) -> bool:
    """Whether an evaluation's metric is a share of problems or completions; rewards may have any range."""
    return not name.startswith("eval/rewards/") and not name.endswith("mean_length")

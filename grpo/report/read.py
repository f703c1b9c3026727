"""Reads the folder of a run, also while the run goes on."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from grpo.config import flat
from grpo.telemetry.console import is_rate
from grpo.telemetry.records import computed, json_safe, read_lines
from grpo.telemetry.samples import read_samples

MEAN_OVER = 10
"""Steps whose mean reward is shown, of the first and of the last; fewer in a short run."""
NOT_OF_EVALUATIONS = (
    "data.dataset",
    "data.eval_dataset",
    "data.max_eval",
    "data.max_train",
    "data.train",
    "eval.before",
    "eval.every",
    "eval.max_",
)
"""Beginnings of keys of ``data`` and ``eval`` on which no evaluation depends, or which are compared
otherwise."""


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
    is_complete: bool
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Records of ``grpo.telemetry.samples``, by step."""
    notes: list[str] = field(default_factory=list)
    """Notes on data that could not be read or was left out; shown in the report."""


def read_run(
    folder: str | Path,
    *,
    max_samples: int = 400,
) -> RunData:
    """Read a run; of more than about ``max_samples`` completions, those of every n-th step; 0:
    none."""
    folder = Path(folder)
    file = folder / "config.yaml"
    values = {}
    if file.exists():
        values = yaml.safe_load(file.read_bytes()) or {}
        values.pop("given", None)
    elif not (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} is not a run: it has neither metrics.jsonl nor config.yaml")
    config = flat(values)

    metrics = list(_by_step(folder / "metrics.jsonl").values())
    last = metrics[-1] if metrics else {}
    max_steps = config.get("optim.max_steps")
    if max_steps is None:
        # An epoch is a sum of fractions.
        is_last = last.get("epoch", 0) >= config.get("optim.num_epochs", 0) - 1e-9
    else:
        is_last = last.get("step", 0) >= max_steps
    has_checkpoint = (folder / f"checkpoint-{last.get('step')}").is_dir()
    run = RunData(
        name=str(config.get("logging.run_name") or folder.resolve().name),
        metrics=metrics,
        intervals=_by_step(folder / "intervals.jsonl"),
        config=config,
        starts=read_lines(folder / "starts.jsonl"),
        is_complete=is_last and has_checkpoint,
    )
    if not metrics:
        run.notes.append("No step has been written yet.")
    if max_samples:
        _read_completions(run, folder / "completions", max_samples)
    return run


def _by_step(path: Path) -> dict[int, dict[str, Any]]:
    """The objects of a file by their step, in order. If a step comes twice, the later line
    counts."""
    lines = {line["step"]: json_safe(line) for line in read_lines(path)}
    return dict(sorted(lines.items()))


def _read_completions(
    run: RunData,
    folder: Path,
    max_samples: int,
) -> None:
    """Add the completions of every n-th step, and of the last one."""
    paths = sorted(folder.glob("step_*.parquet"))
    per_step = run.config.get("logging.log_completions", 1)
    shown = every_nth(paths, len(paths) * per_step // max_samples)
    if len(shown) < len(paths):
        run.notes.append(
            f"Completions of {len(shown)} of {len(paths)} steps are shown; --max-samples shows more."
        )
    for path in shown:
        try:
            run.samples.extend(read_samples(path))
        except (
            OSError,
            ValueError,
        ):  # after a power cut; pyarrow's errors inherit from one of the two
            run.notes.append(f"completions/{path.name} could not be read.")


def every_nth(items: list[Any], n: int) -> list[Any]:
    """The last item, and each n-th before it."""
    return items[:: -max(n, 1)][::-1]


def evaluations(run: RunData) -> list[dict[str, Any]]:
    """Step and evaluation metrics of the steps that have an evaluation."""
    found = []
    for line in run.metrics:
        names = [name for name in line if name.startswith("eval/")]
        if names:
            found.append({name: line[name] for name in ("step", *names)})
    return found


def evaluation_names(run: RunData) -> list[str]:
    """The evaluation metrics of a run."""
    names = {}
    for line in evaluations(run):
        names |= line
    names.pop("step", None)
    return list(names)


def before_and_after(run: RunData) -> list[dict[str, Any]]:
    """``{name, is_rate, before, after}`` of each evaluation metric; sides are ``{step, value, low,
    high}`` or None.

    ``before`` is the evaluation of step 0, before training. ``low`` and ``high`` are the 95%
    interval, or None."""
    found = evaluations(run)
    before = {}
    if found and found[0]["step"] == 0:
        before = found.pop(0)
    after = found[-1] if found else {}
    rows = []
    for name in evaluation_names(run):
        row = {
            "name": name,
            "is_rate": is_rate(name),
        }
        for side, line in ("before", before), ("after", after):
            row[side] = None
            if line.get(name) is not None:
                intervals = run.intervals.get(line["step"], {})
                low, high = intervals.get(name, (None, None))
                row[side] = {
                    "step": line["step"],
                    "value": line[name],
                    "low": low,
                    "high": high,
                }
        rows.append(row)
    return rows


def reward_before_and_after(run: RunData) -> dict[str, Any] | None:
    """A row as of :func:`before_and_after`: the mean reward of the first and of the last steps."""
    steps = [line for line in map(computed, run.metrics) if "reward" in line]
    count = min(MEAN_OVER, len(steps) // 2)
    if count == 0:
        return None
    row = {
        "name": "reward",
        "label": f"reward, mean of {count} steps",
        "is_rate": False,
    }
    for side, lines in ("before", steps[:count]), ("after", steps[-count:]):
        row[side] = {
            "first": lines[0]["step"],
            "step": lines[-1]["step"],
            "value": fmean(line["reward"] for line in lines),
            "low": None,
        }
    return row


def evaluation_settings(run: RunData) -> dict[str, Any]:
    """The settings on which the numbers of an evaluation depend besides the model, rewards and
    seed."""
    config = run.config
    start = run.starts[-1] if run.starts else {}
    limit = config.get("eval.max_completion_length")
    data = config.get("data.eval_dataset")
    settings = {
        "evaluation data": data or config.get("data.dataset"),
        "eval.max_completion_length": limit or config.get("rollout.max_completion_length"),
        "number of problems": start.get("num_eval_problems"),
    }
    for key, value in config.items():
        is_used = key.startswith(("eval.", "data.", "rollout.stop"))
        is_other = key.startswith(NOT_OF_EVALUATIONS)
        if is_used and not is_other:
            settings[key] = value
    return settings

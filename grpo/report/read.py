"""Read the folder of a run, also while the run goes on.

The trainer may append a line or write a file at any moment, so a half-written line is left out. A
file of completions that cannot be read gives a note in the report, not an error.
"""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from grpo.config import flat
from grpo.telemetry.console import is_rate
from grpo.telemetry.records import computed, json_safe, read_lines
from grpo.telemetry.samples import read_samples

MAX_STEPS_OF_MEAN = 10
"""Largest number of steps in the mean reward of the first steps and of the last steps. A short run
has fewer."""
KEYS_NOT_COMPARED = (
    "data.dataset",
    "data.eval_dataset",
    "data.max_eval",
    "data.max_train",
    "data.train",
    "eval.before",
    "eval.every",
    "eval.max_",
)
"""Prefixes of the keys of ``data`` and ``eval`` that :func:`evaluation_settings` leaves out.

Some of these keys do not change the numbers of an evaluation. The others set values that the
function compares separately: the dataset, the number of problems and the limit of completions.
"""


@dataclass
class RunData:
    """The files of one run."""

    name: str
    metrics: list[dict[str, Any]]
    """Lines of ``metrics.jsonl``, in order: one object per step. Values are finite numbers or
    None."""
    intervals: dict[int, dict[str, Any]]
    """95% intervals of the evaluation metrics: step -> metric -> ``[low, high]``."""
    config: dict[str, Any]
    """Configuration of the run: dotted key (``optim.max_steps``) -> value."""
    starts: list[dict[str, Any]]
    """Command, versions and device of each start of the run (``starts.jsonl``)."""
    is_complete: bool
    """True if the last step is done and has a checkpoint."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Records of completions (``grpo.telemetry.samples``), in the order of steps."""
    notes: list[str] = field(default_factory=list)
    """Notes, shown in the report, on data that could not be read or was left out."""

    @property
    def num_eval_problems(self) -> int | None:
        """Number of evaluation problems at the last start of the run; None if it is not known."""
        return self.starts[-1].get("num_eval_problems") if self.starts else None


def read_run(folder: str | Path, *, max_samples: int = 400) -> RunData:
    """Read the files of a run.

    Args:
        max_samples: approximate number of completions to read. If the run wrote more, only
            completions of every n-th step are read. 0 reads no completions.

    Raises:
        ValueError: the folder holds no run.
    """
    folder = Path(folder)
    config_file = folder / "config.yaml"
    values = {}
    if config_file.exists():
        # A full disk may leave an empty file, which YAML reads as None.
        values = yaml.safe_load(config_file.read_bytes()) or {}
        # The entry `given` repeats the values that the user set. It is needed only to resume a run.
        values.pop("given", None)
    elif not (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} is not a run: it has neither metrics.jsonl nor config.yaml")
    config = flat(values)

    # The line of the last step is written before its checkpoint. A run that was killed between the
    # two is not complete, so the checkpoint must exist, too.
    metrics = list(_by_step(folder / "metrics.jsonl").values())
    last = metrics[-1] if metrics else {}
    max_steps = config.get("optim.max_steps")
    if max_steps is None:
        # The epoch of a step is a sum of fractions. By rounding, it may miss the whole number.
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
    """Return the objects of a JSON Lines file by step, in the order of steps. If a step comes
    twice, the later line counts."""
    # Python reads NaN, which the JSON of the page cannot have. NaN becomes None, a gap in the
    # curve.
    lines = {line["step"]: json_safe(line) for line in read_lines(path)}
    return dict(sorted(lines.items()))


def _read_completions(run: RunData, folder: Path, max_samples: int) -> None:
    """Add the completions of every n-th step and of the last step to ``run.samples``."""
    # The number of completions is computed from the configuration, because opening each file to
    # count its rows would take long.
    paths = sorted(folder.glob("step_*.parquet"))
    per_step = run.config.get("logging.log_completions", 1)
    stride = len(paths) * per_step // max_samples
    paths_read = every_nth(paths, stride)
    if len(paths_read) < len(paths):
        run.notes.append(
            f"Completions of {len(paths_read)} of {len(paths)} steps are shown; "
            "--max-samples shows more."
        )
    for path in paths_read:
        # After a power cut a file may be damaged. All errors of pyarrow inherit from one of these
        # two.
        try:
            run.samples.extend(read_samples(path))
        except (OSError, ValueError):
            run.notes.append(f"completions/{path.name} could not be read.")


def every_nth(items: list[Any], n: int) -> list[Any]:
    """Return every n-th item, counted back from the last item, which is included."""
    # The last item is included because somebody who watches a run looks for the newest step.
    return items[:: -max(n, 1)][::-1]


def evaluations(run: RunData) -> list[dict[str, Any]]:
    """Return the step and the evaluation metrics of each step that has an evaluation."""
    lines = []
    for line in run.metrics:
        names = [name for name in line if name.startswith("eval/")]
        if names:
            lines.append({name: line[name] for name in ("step", *names)})
    return lines


def metric_names(lines: list[dict[str, Any]]) -> list[str]:
    """Return the names of all metrics in the lines, in order of their first appearance."""
    names = {}
    for line in lines:
        names |= line
    names.pop("step", None)
    return list(names)


def before_and_after(run: RunData) -> list[dict[str, Any]]:
    """Return one row ``{name, is_rate, before, after}`` per evaluation metric.

    ``before`` is the value at step 0, before training. ``after`` is the value at the last
    evaluation. Both have the form that :func:`_with_interval` returns.
    """
    lines = evaluations(run)
    names = metric_names(lines)
    before = {}
    if lines and lines[0]["step"] == 0:
        # Step 0 is removed from the lines, so that an evaluation is never compared with itself.
        before = lines.pop(0)
    after = lines[-1] if lines else {}

    rows = []
    for name in names:
        row = {
            "name": name,
            "is_rate": is_rate(name),
            "before": _with_interval(run, before, name),
            "after": _with_interval(run, after, name),
        }
        rows.append(row)
    return rows


def _with_interval(run: RunData, line: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return ``{step, value, low, high}`` of a metric; None if the line has no value of the metric.

    ``low`` and ``high`` are the bounds of the 95% interval, None if no interval was written.
    """
    if line.get(name) is None:
        return None
    step = line["step"]
    low, high = run.intervals.get(step, {}).get(name, (None, None))
    return {
        "step": step,
        "value": line[name],
        "low": low,
        "high": high,
    }


def reward_before_and_after(run: RunData) -> dict[str, Any] | None:
    """Return the mean reward of the first and of the last steps, in a row like those of
    :func:`before_and_after`.

    The row is None if fewer than two steps have a reward.
    """
    # Each mean is over at most half of the steps. A step in both means would make them more alike.
    steps = [line for line in map(computed, run.metrics) if "reward" in line]
    count = min(MAX_STEPS_OF_MEAN, len(steps) // 2)
    if count == 0:
        return None
    return {
        "name": "reward",
        "label": f"reward, mean of {count} steps",
        "is_rate": False,
        "before": _mean_reward(steps[:count]),
        "after": _mean_reward(steps[-count:]),
    }


def _mean_reward(lines: list[dict[str, Any]]) -> dict[str, Any]:
    # There is no interval. The policy changes from step to step, so the spread of the rewards does
    # not measure the error of their mean.
    return {
        "first": lines[0]["step"],
        "step": lines[-1]["step"],
        "value": fmean(line["reward"] for line in lines),
        "low": None,
    }


def evaluation_settings(run: RunData) -> dict[str, Any]:
    """Return the settings on which the numbers of an evaluation depend, apart from model, rewards
    and seed."""
    config = run.config
    # Settings with a fallback are compared by the value in effect, because two runs may set the
    # same value by different keys.
    data = config.get("data.eval_dataset")
    limit = config.get("eval.max_completion_length")
    settings = {
        "evaluation data": data or config.get("data.dataset"),
        "eval.max_completion_length": limit or config.get("rollout.max_completion_length"),
        "number of problems": run.num_eval_problems,
    }
    for key, value in config.items():
        is_of_evaluations = key.startswith(("eval.", "data.", "rollout.stop"))
        if is_of_evaluations and not key.startswith(KEYS_NOT_COMPARED):
            settings[key] = value
    return settings

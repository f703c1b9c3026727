"""The results of a run in a sweep: whether it is complete with the settings that are asked for, and its numbers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from grpo.commands.sweep.plan import PlannedRun
from grpo.config import Config, ConfigError
from grpo.report.read import RunData, evaluations, flat, read_run

NOT_COMPARED = (
    "output_dir", "reward.timeout_s", "reward.num_workers", "rollout.tokens_in_flight", "checkpoint.", "logging.", "runtime.",
)  # fmt: skip
"""Keys, and beginnings of keys, that change where and how fast a run is computed, not its results beyond rounding."""
BUT_COMPARED = ("runtime.precision",)
LAST_STEPS = 10
AT_THE_END = ("reward", "completions/mean_length", "entropy", "kl")
"""Metrics of training of which the mean of the last steps is taken: they describe the policy that was reached."""
ALL_ALONG = ("grad_norm", "clip_ratio/region_mean")
"""Metrics of training of which the mean of all steps is taken: a falling learning rate makes them small at the end."""


def finished(run: PlannedRun) -> RunData | None:
    """The files of a run that is complete with these settings; None for one that has to start or to go on.

    Raises:
        ConfigError: if the folder has a checkpoint of a run with other settings.
    """
    try:
        found = read_run(run.folder, max_samples=0)
    except ValueError:  # no such folder, or not a run's: the run itself says so
        return None
    config = run.config
    has_settings = found.config and any(run.folder.glob("checkpoint-*")) and not config.checkpoint.accept_changes
    if has_settings and (changes := differences(config, found.config)):
        listed = "; ".join(f"{key}: checkpoint {old!r}, now {new!r}" for key, old, new in changes)
        remedies = "use another --output, the old values, or checkpoint.accept_changes=true"
        raise ConfigError(f"{run.folder} was started with other settings ({listed}): {remedies}")
    return found if found.is_complete else None


def differences(asked: Config, found: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """``(key, value of the run, value asked for)`` of each setting that differs and may change a result.

    Args:
        found: dotted key -> value, of the run's ``config.yaml``. A key that did not exist when the run was made has its default.
    """
    defaults = dict(flat(Config().for_writing()))
    changes = []
    for key, new in flat(asked.for_writing()):
        old = found.get(key, defaults.get(key))
        if old != new and (key in BUT_COMPARED or not key.startswith(NOT_COMPARED)):
            changes.append((key, old, new))
    return changes


def measure(run: RunData) -> dict[str, float]:
    """The numbers of one run by the names of its metrics: the last evaluation, and of training what the constants above say."""
    steps = [line for line in run.metrics if "reward" in line]
    numbers = {}
    if evaluated := [line for line in evaluations(run) if line["step"] > 0]:
        numbers = {name: value for name, value in evaluated[-1].items() if name.startswith("eval/")}
    for names, chosen in ((AT_THE_END, steps[-LAST_STEPS:]), (ALL_ALONG, steps)):
        for name in names:
            values = [line[name] for line in chosen if line.get(name) is not None]
            numbers[name] = statistics.fmean(values) if values else None
    seconds = [line["step_time"] for line in steps if line.get("step_time") is not None]
    numbers["step_time"] = statistics.median(seconds) if seconds else None
    return {name: value for name, value in numbers.items() if value is not None}


def before_training(found: dict[str, dict[int, RunData]]) -> dict[int, dict[str, float]]:
    """Seed -> metric -> value of the evaluation of step 0; empty if variants differ in it, in the way they sample for example."""
    by_seed: dict[int, dict[str, float]] = {}
    for runs in found.values():
        for seed, run in runs.items():
            for line in evaluations(run):
                if line["step"] == 0:
                    numbers = {
                        name: value for name, value in line.items() if name.startswith("eval/") and value is not None
                    }
                    if by_seed.setdefault(seed, numbers) != numbers:
                        return {}
    return by_seed


def runs_in(output: Path) -> list[tuple[str, int, Path]]:
    """``(variant, seed, folder)`` of each run that lies in the folder of a sweep; ``base`` first, then by name and seed."""
    found = []
    for folder in output.glob("*/seed-*"):
        if folder.is_dir() and (seed := folder.name.removeprefix("seed-")).isdecimal():
            found.append((folder.parent.name, int(seed), folder))
    return sorted(found, key=lambda run: (run[0] != "base", run))

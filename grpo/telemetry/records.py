"""Files with one JSON object per line, for steps (metrics.jsonl, intervals.jsonl) and for starts of
a run (starts.jsonl)."""

import contextlib
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from grpo.system import sync, write_atomically

LOGGED_PREFIX = "logged/"
"""Prefix of the metrics that reward functions log. Without it, such a metric might have the name of
another metric."""


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append an object to a file, and wait until it is on disk."""
    text = json.dumps(json_safe(line))
    # Opened for each line, since a person may have moved the file meanwhile.
    with open(path, "a") as file:
        file.write(text + "\n")
    sync(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file; an empty list if there is no such file."""
    objects = []
    if not path.exists():
        return objects
    for line in path.read_bytes().split(b"\n"):
        # A process that was killed may have left half a line.
        with contextlib.suppress(ValueError):
            objects.append(json.loads(line))
    return objects


def add_to_step(path: Path, line: dict[str, Any]) -> None:
    """Merge ``line`` into the last object of a file if both have the same step; else append
    ``line``."""
    steps = read_lines(path)
    if steps and steps[-1]["step"] == line["step"]:
        # If an evaluation is made a second time, its new numbers count.
        line = steps[-1] | line
        remove_steps_after(path, line["step"] - 1)
    append_line(path, line)


def remove_steps_after(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Remove the objects of steps after ``last_step``, and return the objects that are left. A
    resumed run writes the removed steps again."""
    steps = [line for line in read_lines(path) if line["step"] <= last_step]
    lines = [json.dumps(line) + "\n" for line in steps]
    # The file is replaced at once: a kill leaves the old file or the new one.
    write_atomically(path, "".join(lines))
    return steps


def is_computed(value: float | None) -> bool:
    """True for a finite number.

    A metric that was not computed is NaN in a step, and null in ``metrics.jsonl``.
    """
    return value is not None and math.isfinite(value)


def computed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics whose value is a finite number."""
    return {name: value for name, value in metrics.items() if is_computed(value)}


def json_safe(value: Any, default: Callable | None = None) -> Any:
    """Return a copy of a value with None in place of NaN and infinity, which JSON does not have.

    Args:
        default: function that converts an object of another type, such as bytes or a date. Default:
            such an object is a TypeError.
    """
    text = json.dumps(value, default=default)
    return json.loads(text, parse_constant=lambda name: None)


def environment(world_size: int) -> dict[str, Any]:
    """Return facts about the start of a run: time, command, hardware and versions.

    Host name, user name and environment variables are left out, since a report may be published.
    """
    device = f"{platform.machine()} CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
    folder = shlex.quote(str(Path(__file__).parent))
    # The commit's full hash, never a tag, with -dirty if files have changed since. On a slow disk
    # git may take minutes to find changed files.
    describe = (
        f"timeout 10 git -C {folder} describe --always --dirty --abbrev=40 --exclude='*' "
        "2>/dev/null"
    )
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(sys.argv),
        "world_size": world_size,
        "device": device,
        "threads_per_rank": torch.get_num_threads(),
        "python": platform.python_version(),
        # Empty if there is no git, or if the package is installed outside a checkout.
        "git_commit": subprocess.getoutput(describe) or None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }

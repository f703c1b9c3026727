"""Records of a run, a JSON object per line: steps (metrics.jsonl, intervals.jsonl) and starts
(starts.jsonl)."""

import contextlib
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from grpo.system import sync, write_atomically

LOGGED_PREFIX = "logged/"
"""Before the names of the metrics that reward functions logged, which may be any."""


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append an object, and wait until the disk has it. The file is opened for each, in case it was
    moved."""
    text = json.dumps(json_safe(line))
    with open(path, "a", encoding="utf-8") as file:
        file.write(text + "\n")
    sync(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All objects. Lines that are no JSON are left out: a killed process may leave half a line."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def add_to_step(path: Path, line: dict[str, Any]) -> None:
    """Add to the object of the last step, if that is the step of ``line``; else append ``line``."""
    steps = read_lines(path)
    if steps and steps[-1]["step"] == line["step"]:
        line = steps[-1] | line
        remove_steps_after(path, line["step"] - 1)
    append_line(path, line)


def remove_steps_after(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Remove the objects of later steps, which a resumed run writes again; returns the others."""
    kept = [line for line in read_lines(path) if line["step"] <= last_step]
    text = [json.dumps(line) + "\n" for line in kept]
    write_atomically(path, "".join(text))
    return kept


def is_computed(value: float | None) -> bool:
    """True for a number. A metric that was not computed is NaN in a step, and null in
    ``metrics.jsonl``."""
    return value is not None and math.isfinite(value)


def computed(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics that were computed."""
    return {name: value for name, value in metrics.items() if is_computed(value)}


def json_safe(value: Any) -> Any:
    """A copy in which NaN and infinity, which JSON does not have, are None."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    is_number = not isinstance(value, float) or math.isfinite(value)
    return value if is_number else None


def environment(world_size: int) -> dict[str, Any]:
    """Facts about this start. Without host name, user name and environment variables: a report may
    be published."""
    device = f"{platform.machine()} CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
    folder = shlex.quote(str(Path(__file__).parent))
    describe = f"timeout 10 git -C {folder} describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null"
    status, commit = subprocess.getstatusoutput(describe)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(sys.argv),
        "world_size": world_size,
        "device": device,
        "threads_per_rank": torch.get_num_threads(),
        "python": platform.python_version(),
        "git_commit": commit if status == 0 else None,  # without git, or outside of a checkout
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }

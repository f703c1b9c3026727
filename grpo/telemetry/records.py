"""Records of a run: a JSON object per step (metrics.jsonl, intervals.jsonl), and one per start (run.json)."""

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from grpo.system import write_atomically

PACKAGES = ("torch", "transformers", "datasets", "pydantic", "wandb", "pyarrow", "math-verify")
LOGGED_PREFIX = "logged/"
"""Before the names of the metrics and columns that reward functions logged, which may be any."""


def append_step(path: Path, line: dict[str, Any]) -> None:
    """Append the object of one step. The file is opened for each, in case it was moved or deleted."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(json_safe(line)) + "\n")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The objects of all steps. Lines that are no JSON are left out: a killed process may leave half a line."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def add_to_step(path: Path, line: dict[str, Any]) -> None:
    """Add to the object of the last step, if that is the step of ``line``; else append ``line``."""
    steps = read_steps(path)
    if not steps or steps[-1]["step"] != line["step"]:
        append_step(path, line)
        return
    added = json.dumps(steps[-1] | json_safe(line)) + "\n"
    start_of_last = path.read_bytes().rstrip(b"\n").rfind(b"\n") + 1
    # In place, since a reader may follow the file.
    with open(path, "rb+") as file:
        file.seek(start_of_last)
        file.write(added.encode())
        file.truncate()


def remove_steps_after(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Remove the objects of later steps, which a resumed run writes again; returns the others."""
    kept = [line for line in read_steps(path) if line["step"] <= last_step]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def is_computed(value: float | None) -> bool:
    """True for a number. A metric that was not computed is NaN in a step, and null in ``metrics.jsonl``."""
    return value is not None and math.isfinite(value)


def json_safe(value: Any) -> Any:
    """A copy in which NaN and infinity, which JSON does not have, are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    return [json_safe(item) for item in value] if isinstance(value, (list, tuple)) else value


def environment(world_size: int) -> dict[str, Any]:
    """Facts about this start. Without host name, user name and environment variables: a report may be published."""
    cuda = torch.cuda.is_available()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(sys.argv),
        "world_size": world_size,
        "device": torch.cuda.get_device_name(0) if cuda else platform.machine() + " CPU",
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cuda": torch.version.cuda if cuda else None,
        **_versions(PACKAGES),
        "git_commit": _git_commit(Path(__file__).parents[2]),
    }


def record_start(output_dir: str | Path, start: dict[str, Any]) -> None:
    """Add a start to ``run.json``."""
    starts = [*read_starts(output_dir), start]
    write_atomically(Path(output_dir) / "run.json", json.dumps({"starts": starts}, indent=1))


def read_starts(output_dir: str | Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; empty without a readable ``run.json``."""
    try:
        return json.loads((Path(output_dir) / "run.json").read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError):
        return []


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _git_commit(folder: Path) -> str | None:
    """The commit of a checkout, with ``-dirty`` if files differ from it; None without git or outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None

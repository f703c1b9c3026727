"""``run.json`` in the output folder: for each start of the run its command, versions, device and the state of the code."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from grpo.system import open_regular, write_atomically

PACKAGES = ("torch", "transformers", "datasets", "pydantic", "wandb", "pyarrow", "math-verify")
FILE_NAME = "run.json"


def environment(world_size: int) -> dict[str, Any]:
    """Facts about this start. Without host name, user name and environment variables, because a report may be published."""
    cuda, versions = torch.cuda.is_available(), {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
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
        **versions,
        **git_state(Path(__file__).resolve().parents[2]),
    }


def git_state(folder: Path) -> dict[str, Any]:
    """``git_commit``, ``git_branch`` and ``git_changed`` (whether tracked files differ from the commit); empty outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {
            "git_commit": git("rev-parse", "HEAD"),
            "git_branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "git_changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or no permission to read it
        return {}


def record_start(output_dir: str | Path, start: dict[str, Any]) -> None:
    """Add a start to ``run.json``; replaces a file that cannot be read."""
    starts = [*read_starts(output_dir), start]
    write_atomically(Path(output_dir) / FILE_NAME, json.dumps({"starts": starts}, indent=1))


def read_starts(output_dir: str | Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; empty if there is no readable ``run.json``."""
    try:
        with open_regular(Path(output_dir) / FILE_NAME) as file:
            starts = json.load(file)["starts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []

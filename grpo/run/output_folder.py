"""The output folder of a run: checked, created, and cleared of the results of an earlier run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import yaml

from grpo.config import Config, ConfigError
from grpo.run import checkpoint
from grpo.run.lock import LOCK_FILE, Lock
from grpo.system import write_atomically

RESOLVED_CONFIG = "config.yaml"


def check_output_dir(output: Path) -> None:
    """ConfigError if ``output_dir`` is a file, cannot be written, or holds something other than a run. Nothing is created."""
    existing = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        problem = f"cannot be made: {existing} is a file, not a folder"
        raise ConfigError(f"output_dir={output} {'is a file: choose a folder' if existing == output else problem}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={output} cannot be written: no permission in {existing}")
    if existing != output:
        return
    # A run that was killed while it started leaves its lock and a half-written config.yaml; one whose folder was deleted while it
    # ran leaves a checkpoint.
    inside = sorted(path.name for path in output.iterdir() if path.name not in (LOCK_FILE, f"{RESOLVED_CONFIG}.tmp"))
    is_run = RESOLVED_CONFIG in inside or any(
        (folder / checkpoint.MANIFEST).exists() for _, folder in checkpoint.list_checkpoints(output)
    )
    if inside and not is_run:
        found = ", ".join(inside[:4])
        raise ConfigError(f"output_dir={output} holds something that is not a run ({found}): choose another folder")


def start_output(config: Config, start_checkpoint: Path | None, lock: Lock) -> None:
    """Create and lock ``output_dir``, write the resolved configuration, and move results that this run does not continue aside."""
    output = Path(config.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={output} cannot be made: {error.strerror}") from None
    lock.acquire(output)
    if start_checkpoint is not None and start_checkpoint.parent.resolve() == output.resolve():
        # Later checkpoints are broken or of steps that this run computes again: `auto` must not choose them.
        start_step = checkpoint.read_state(start_checkpoint)["step"]
        for step, folder in checkpoint.list_checkpoints(output):
            if step > start_step:
                aside = _move_aside(output, [folder])
                print(f"{folder}, which is not continued, was moved to {aside}", flush=True)
    elif results := [*output.glob("checkpoint-*"), *output.glob("metrics.jsonl")]:
        others = [
            output / name for name in ("completions", RESOLVED_CONFIG, "run.json", "intervals.jsonl", "tensorboard")
        ]
        aside = _move_aside(output, [*results, *others])
        print(f"an earlier run in {output} was moved to {aside}", flush=True)
    resolved = yaml.safe_dump(config.for_writing(), sort_keys=False, allow_unicode=True)
    write_atomically(output / RESOLVED_CONFIG, resolved)


def _move_aside(output: Path, paths: list[Path]) -> Path:
    """Move what exists of ``paths`` into a new folder ``previous-<n>/``."""
    aside = output / f"previous-{1 + len(list(output.glob('previous-*')))}"
    aside.mkdir()
    for path in filter(Path.exists, paths):
        shutil.move(path, aside / path.name)
    return aside

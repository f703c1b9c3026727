"""The output folder of a run: checked, created, locked, and cleared of the results of an earlier run."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from pathlib import Path

import yaml

from grpo.checkpoint import format as checkpoint
from grpo.config import Config, ConfigError
from grpo.system import write_atomically

RESOLVED_CONFIG, LOCK_FILE = "config.yaml", ".lock"


class Lock:
    """Held by the main rank for the whole run, so that no other run writes there; the kernel releases it.

    The file stays. It names the holder, for messages and for the other machines of a run.
    """

    holder = ""
    _handle: int | None = None

    def acquire(self, folder: Path) -> None:
        """Lock an existing folder, unless this object holds the lock already; ConfigError if another run holds it."""
        if self._handle is not None:
            return
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                holder = " on ".join(os.read(handle, 300).decode(errors="replace").split())
                os.close(handle)
                raise ConfigError(f"output_dir={folder} is in use by another run (process {holder})") from None
            # a network file system without locks
            print(f"warning: {folder} cannot be locked ({error.strerror}): start no second run there", flush=True)
        self._handle, self.holder = handle, f"{os.getpid()}\n{socket.gethostname()}\n"
        os.ftruncate(handle, 0)
        os.pwrite(handle, self.holder.encode(), 0)
        os.fsync(handle)

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def check_output_dir(output: Path) -> None:
    """ConfigError if ``output_dir`` is a file, cannot be written, or holds something else than a run."""
    existing = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={output}: {existing} is no folder, or cannot be written")
    inside = {path.name for path in output.iterdir()} if output.is_dir() else set()
    # A run that was killed while it started leaves its lock and a half-written config.yaml; one whose folder was
    # deleted while it ran leaves a checkpoint.
    others = inside - {LOCK_FILE, f"{RESOLVED_CONFIG}.tmp"}
    if others and RESOLVED_CONFIG not in inside and checkpoint.find_newest_valid(output)[0] is None:
        raise ConfigError(f"output_dir={output} holds something that is not a run: {min(others)}")


def start_output(config: Config, start_checkpoint: Path | None, lock: Lock) -> None:
    """Create and lock ``output_dir``, write the configuration, move aside what this run does not continue."""
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    lock.acquire(output)
    if start_checkpoint is not None and start_checkpoint.parent.resolve() == output.resolve():
        # Later checkpoints are broken or of steps that this run computes again: `auto` must not choose them.
        start_step = checkpoint.read_state(start_checkpoint)["step"]
        later = [folder for step, folder in checkpoint.list_checkpoints(output) if step > start_step]
        _move_aside(output, later, "checkpoints which are not continued were")
    elif results := [*output.glob("checkpoint-*"), *output.glob("metrics.jsonl")]:
        names = "completions", RESOLVED_CONFIG, "run.json", "intervals.jsonl", "tensorboard"
        _move_aside(output, [*results, *(output / name for name in names)], f"an earlier run in {output} was")
    resolved = yaml.safe_dump(config.for_writing(), sort_keys=False, allow_unicode=True)
    write_atomically(output / RESOLVED_CONFIG, resolved)


def check_shared(output: Path, holder: str) -> None:
    """ConfigError unless this rank sees the lock that the main rank, the ``holder``, has on ``output_dir``."""
    lock = output / LOCK_FILE
    if not lock.exists() or lock.read_text(encoding="utf-8") != holder:
        raise ConfigError(
            f"output_dir={output} on {socket.gethostname()} is not the main rank's folder: with "
            "runtime.parallel=fsdp, where each rank writes a part of each checkpoint, all machines must share it"
        )


def _move_aside(output: Path, paths: list[Path], what: str) -> None:
    """Move what exists of ``paths`` into a new folder ``previous-<n>/``, and say so."""
    if not paths:
        return
    aside = output / f"previous-{1 + len(list(output.glob('previous-*')))}"
    aside.mkdir()
    for path in filter(Path.exists, paths):
        shutil.move(path, aside / path.name)
    print(f"{what} moved to {aside}", flush=True)

"""The start of a run: its output folder, the checkpoint it continues from, and settings that must not change then."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo.checkpoint import format as checkpoint
from grpo.config import Config, ConfigError, flat, settings_but
from grpo.config.secrets import masked
from grpo.model import digest, is_adapter, model_digests
from grpo.rewards import RewardRunner
from grpo.system import write_atomically

RESOLVED_CONFIG = "config.yaml"
LOCK_FILE = ".lock"
ABOUT_GIVEN = """\
# What was set. A run that has this file as --config begins from it: what a preset or another key
# implied follows anew. Change a value here and above, or remove one of the two."""
OF_A_RUN = (
    "metrics.jsonl",
    "intervals.jsonl",
    "completions",
    "run.json",
    "tensorboard",
    RESOLVED_CONFIG,
)
"""Files of a run besides its checkpoints, which a later run in the same folder overwrites or moves aside."""


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
        except OSError as error:  # another run's lock, or a network file system without locks
            if isinstance(error, BlockingIOError):
                holder = " on ".join(os.read(handle, 300).decode(errors="replace").split())
                os.close(handle)
                raise ConfigError(f"output_dir={folder} is in use by another run (process {holder})") from None
            print(f"warning: {folder} cannot be locked ({error.strerror}): start no second run there", flush=True)
        self._handle, self.holder = handle, f"{os.getpid()}\n{socket.gethostname()}\n"
        os.ftruncate(handle, 0)
        os.pwrite(handle, self.holder.encode(), 0)
        os.fsync(handle)

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


@dataclass(frozen=True)
class StartPoint:
    checkpoint: Path | None = None
    """None: from scratch, at step 0."""
    origin: str | None = None
    """The folder, or for ``never`` the launch of torchrun, that ``checkpoint.resume`` began from."""
    state: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's state (``trainer/state.json``); empty from scratch."""
    changes: list[tuple[str, Any, Any]] = field(default_factory=list)
    """``(key, old, new)`` of what differs from the checkpoint's run and ``checkpoint.accept_changes`` accepts."""
    data_fingerprint: str = ""
    """Of the rows that the run trains on now."""
    content: dict[str, str] = field(default_factory=dict)
    """Digests of the files that it reads now, by name."""

    @property
    def compared(self) -> dict[str, Any]:
        """The facts that each checkpoint of the run keeps for the next start."""
        return {
            "data_fingerprint": self.data_fingerprint,
            "origin": self.origin,
            "content": self.content,
        }


def find_checkpoint(config: Config, lock: Lock) -> tuple[Path | None, str | None]:
    """The checkpoint to continue from (None: from scratch) and the origin; locks ``output_dir`` if it exists.

    A command that names a checkpoint folder starts from it once: the same command, started again after an interruption,
    continues its own run instead. The same holds for ``never`` when torchrun restarts its processes.

    ConfigError if that folder is not a valid checkpoint, or ``output_dir`` is in use or holds files of others.
    """
    output, resume = Path(config.output_dir), config.checkpoint.resume
    check_output_dir(output)
    newest, warnings = None, []
    if output.is_dir():
        lock.acquire(output)
        checkpoint.recover(output)
        newest, warnings = checkpoint.find_newest_valid(output)
    if resume == "auto":
        for warning in warnings:
            print(f"warning: {warning}", flush=True)
        return newest, None
    if resume == "never":
        launch = os.environ.get("TORCHELASTIC_RUN_ID")
        start, origin = None, launch and f"torchrun {launch}, process {os.getppid()}"
    else:
        start = Path(resume).resolve()
        origin = str(start)
    if newest is not None and origin is not None and checkpoint.read_state(newest)["origin"] == origin:
        return newest, origin
    if start is not None and (broken := checkpoint.problem(start)):
        raise ConfigError(f"checkpoint.resume={broken}; use auto, never, or a whole checkpoint folder")
    return start, origin


def content_digests(
    config: Config,
    model_path: str,
    rewards: RewardRunner,
    reference_path: str | None = None,
    own_files: dict[str, str] | None = None,
) -> dict[str, str]:
    """Digests of what a continued run reads again: files of models and rewards; commits of models of the Hub.

    Args:
        model_path: the folder or Hub id that ``model.name_or_path`` stands for.
        rewards: its functions are loaded; Python objects have no digest.
        reference_path: what ``model.reference`` stands for; None if the reference is the model of the start.
        own_files: source files of tools, environments, loss and advantages, by their names in messages.
    """
    # The policy's weights come from the checkpoint; those of the start are read again for a reference or an adapter.
    is_reference = config.algorithm.beta > 0 and reference_path is None
    found = model_digests(config.model.name_or_path, model_path, with_weights=is_reference or config.uses_lora)
    others = {config.model.adapter: config.model.adapter, **{name: name for name in rewards.classifier_models}}
    if reference_path is not None:
        others[config.model.reference] = reference_path
    for name, path in others.items():
        found |= model_digests(name, path, with_weights=True) if name is not None else {}
    return found | {name: digest(path) for name, path in {**rewards.source_files, **(own_files or {})}.items()}


def read_start_point(
    config: Config, folder: Path | None, origin: str | None, data_fingerprint: str, content: dict[str, str]
) -> StartPoint:
    """Read the checkpoint's state; ConfigError lists what differs, unless ``checkpoint.accept_changes``."""
    if folder is None:
        return StartPoint(origin=origin, data_fingerprint=data_fingerprint, content=content)
    if is_adapter(folder) != config.uses_lora:
        kind = "all weights" if config.uses_lora else "a LoRA adapter"
        raise ConfigError(f"{folder} holds {kind}, unlike this run: set lora.rank as it was")
    state = checkpoint.read_state(folder)
    changes = _differences(config, state, data_fingerprint, content)
    if changes and not config.checkpoint.accept_changes:
        listed = "; ".join(f"{key}: checkpoint {old!r}, now {new!r}" for key, old, new in changes)
        raise ConfigError(
            f"{config.output_dir} was started with other settings ({listed}): "
            "use another output_dir, the old values, or checkpoint.accept_changes=true"
        )
    if folder.parent.resolve() != Path(config.output_dir).resolve():
        # A branch of a run in another folder: that run's wandb run and best checkpoint are not continued.
        state = state | {"best": None, "wandb_run_id": None}
    return StartPoint(folder, origin or state["origin"], state, changes, data_fingerprint, content)


def print_differences(start: StartPoint, bits_depend_on: dict[str, Any]) -> None:
    """Print the accepted changes, and what differs from the checkpoint's run and may change the last bits."""
    if start.changes:
        listed = "; ".join(f"{key}: {old} -> {new}" for key, old, new in start.changes)
        print(f"note: checkpoint.accept_changes accepts {listed}", flush=True)
    before = start.state["bits_depend_on"]
    if changed := [f"{name} {before[name]} -> {now}" for name, now in bits_depend_on.items() if before[name] != now]:
        print(f"note: since the checkpoint {', '.join(changed)}: results can differ by rounding", flush=True)


def _differences(
    config: Config, state: dict[str, Any], data_fingerprint: str, content: dict[str, str]
) -> list[tuple[str, Any, Any]]:
    """``(key, old, new)`` for each setting, the data, and each file, that must not change and does."""
    triples = [("rows of data.dataset", state["data_fingerprint"][:12], data_fingerprint[:12])]
    for name in sorted(state["content"].keys() | content.keys()):
        old = state["content"].get(name, "missing")
        new = content.get(name, "missing")
        triples.append((f"content of {name}", old[:12], new[:12]))

    # A key that the checkpoint's version did not have had its default there.
    saved = flat(Config().for_writing()) | flat(masked(state["config"]))
    for key, value in settings_but("may change when a run continues", config).items():
        triples.append((key, saved[key], value))
    return [(key, old, new) for key, old, new in triples if old != new]


def check_output_dir(output: Path) -> None:
    """ConfigError if ``output_dir`` is a file, cannot be written, or holds files of others that a run would replace.

    All other files may be there: the shell's log, ``evaluation.json`` of an evaluation before training.
    """
    existing = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={output}: {existing} is no folder, or cannot be written")
    if (output / RESOLVED_CONFIG).exists():
        return
    taken = [*output.glob("checkpoint-*"), *_existing(output)]
    # A run whose folder was deleted while it ran leaves a checkpoint without its config.yaml.
    if taken and checkpoint.find_newest_valid(output)[0] is None:
        raise ConfigError(
            f"output_dir={output} holds {taken[0].name}, which a run would replace, and no {RESOLVED_CONFIG} of a run: "
            "take another folder"
        )


def _existing(output: Path) -> list[Path]:
    return [output / name for name in OF_A_RUN if (output / name).exists()]


def start_output(config: Config, start_checkpoint: Path | None, lock: Lock) -> None:
    """Create and lock ``output_dir``, write the configuration, move aside what this run does not continue."""
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    lock.acquire(output)
    written = output / RESOLVED_CONFIG
    resolved = yaml.safe_dump(config.for_saving(), sort_keys=False, allow_unicode=True)
    resolved = resolved.replace("\ngiven:", f"\n{ABOUT_GIVEN}\ngiven:")
    if start_checkpoint is not None and start_checkpoint.parent.resolve() == output.resolve():
        # Later checkpoints are broken or of steps that this run computes again: `auto` must not choose them.
        start_step = checkpoint.read_state(start_checkpoint)["step"]
        later = [folder for step, folder in checkpoint.list_checkpoints(output) if step > start_step]
        _move_aside(output, later, "checkpoints which are not continued were")
    else:
        checkpoints = list(output.glob("checkpoint-*"))
        metrics = output / "metrics.jsonl"
        has_steps = metrics.exists() and metrics.stat().st_size > 0
        if checkpoints or has_steps:
            _move_aside(output, [*checkpoints, *_existing(output)], f"an earlier run in {output} was")
        elif written.exists() and written.read_text(encoding="utf-8") != resolved:
            # It may be what the user wrote and gave as --config.
            _move_aside(output, [written], f"another {RESOLVED_CONFIG} in {output} was")
    write_atomically(written, resolved)


def check_shared(output: Path, holder: str) -> None:
    """ConfigError unless this rank sees the lock that the main rank, the ``holder``, has on ``output_dir``."""
    lock = output / LOCK_FILE
    if not lock.exists() or lock.read_text(encoding="utf-8") != holder:
        raise ConfigError(
            f"output_dir={output} on {socket.gethostname()} is not the main rank's folder: with "
            "runtime.parallel=fsdp, where each rank writes a part of each checkpoint, all machines must share it"
        )


def _move_aside(output: Path, paths: list[Path], what: str) -> None:
    """Move ``paths`` into a new folder ``previous-<n>/``, and say so."""
    if not paths:
        return
    aside = output / f"previous-{1 + len(list(output.glob('previous-*')))}"
    aside.mkdir()
    for path in paths:
        shutil.move(path, aside / path.name)
    print(f"{what} moved to {aside}", flush=True)

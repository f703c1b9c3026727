"""The start of a run: its output folder, the checkpoint it continues from, and settings that must
not change then."""

import fcntl
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from grpo.checkpoint import format as checkpoint
from grpo.config import Config, ConfigError, flat, settings_except
from grpo.model import digest, is_adapter, model_digests
from grpo.rewards import RewardRunner
from grpo.system import write_atomically

ABOUT_GIVEN = """\
# What was set. A run that has this file as --config begins from it: what a preset or another key
# implied follows anew. Change a value here and above, or remove one of the two."""
OF_A_RUN = (
    "checkpoint-*",
    "metrics.jsonl",
    "intervals.jsonl",
    "completions",
    "starts.jsonl",
    "tensorboard",
    "config.yaml",
)
"""Patterns of the files that a run writes, and a later run in the same folder would overwrite."""


class Lock:
    """Held by the main rank for the whole run, so that no other run writes there; the kernel
    releases it.

    The file stays. It names the holder.
    """

    _file: IO[str] | None = None

    def acquire(self, folder: Path) -> None:
        """Lock an existing folder, unless this object holds the lock already; ConfigError if
        another run holds it."""
        if self._file is not None:
            return
        file = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = " on ".join(file.read().split())
            file.close()
            raise ConfigError(
                f"output_dir={folder} is in use by another run (process {holder})"
            ) from None
        except OSError as error:  # a network file system without locks
            print(f"warning: {folder} cannot be locked ({error}): start no second run there")
        file.truncate(0)
        file.write(f"{os.getpid()}\n{socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class StartPoint:
    checkpoint: Path | None
    """None: from scratch, at step 0."""
    facts: dict[str, Any]
    """The facts that each checkpoint of the run keeps for the next start: ``origin``, the folder,
    or for ``never`` the launch of torchrun, that ``checkpoint.resume`` began from; ``content``, the
    digests of rows and files by name."""
    state: dict[str, Any]
    """The checkpoint's state (``trainer/state.json``); empty from scratch."""
    changes: list[tuple[str, Any, Any]]
    """``(key, old, new)`` of what differs from the checkpoint's run and
    ``checkpoint.accept_changes`` accepts."""


def find_checkpoint(config: Config, lock: Lock) -> tuple[Path | None, str | None]:
    """The checkpoint to continue from (None: from scratch) and the origin; locks ``output_dir`` if
    it exists.

    A command that names a checkpoint folder starts from it once: the same command, started again
    after an interruption, continues its own run instead. The same holds for ``never`` when torchrun
    restarts its processes.

    ConfigError if that folder is not a valid checkpoint, or ``output_dir`` is in use.
    """
    output = Path(config.output_dir)
    resume = config.checkpoint.resume
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={output}: {existing} is no folder, or cannot be written")
    if output.is_dir():
        lock.acquire(output)
        checkpoint.recover(output)
    newest = checkpoint.find_newest_valid(output)
    if resume == "auto":
        if not newest and checkpoint.list_checkpoints(output):
            raise ConfigError(
                f"no checkpoint in {output} is valid: checkpoint.resume=never starts anew"
            )
        return newest, None

    start = None
    if resume == "never":
        launch = os.environ.get("TORCHELASTIC_RUN_ID")
        origin = launch and f"torchrun {launch}, process {os.getppid()}"
    else:
        start = Path(resume).resolve()
        origin = str(start)
    if newest and origin and checkpoint.read_state(newest)["origin"] == origin:
        return newest, origin
    broken = start and checkpoint.why_invalid(start)
    if broken:
        raise ConfigError(
            f"checkpoint.resume={broken}; use auto, never, or a whole checkpoint folder"
        )
    return start, origin


def content_digests(
    config: Config,
    model_path: str,
    rewards: RewardRunner,
    reference_path: str | None,
    user_files: dict[str, str],
) -> dict[str, str]:
    """Digests of what a continued run reads again: files of models and rewards; commits of models
    of the Hub.

    Args: model_path: the folder or Hub id that ``model.name_or_path`` stands for. rewards: its
        functions are loaded; Python objects have no digest. reference_path: what
        ``model.reference`` stands for; None if the reference is the model of the start. user_files:
        source files of tools, environments, loss and advantages, by their names in messages.
    """
    models = {config.model.adapter: config.model.adapter}
    models[config.model.name_or_path] = model_path
    models[config.model.reference] = reference_path
    found = {}
    for name, path in models.items():
        if path is not None:
            found |= model_digests(name, path, with_weights=True)
    for name, path in (rewards.source_files | user_files).items():
        found[name] = digest(path)
    return found


def read_start_point(
    config: Config,
    folder: Path | None,
    facts: dict[str, Any],
) -> StartPoint:
    """Read the checkpoint's state; ConfigError lists what differs, unless
    ``checkpoint.accept_changes``."""
    if folder is None:
        return StartPoint(None, facts, {}, [])
    if is_adapter(folder) != config.uses_lora:
        kind = "all weights" if config.uses_lora else "a LoRA adapter"
        raise ConfigError(f"{folder} holds {kind}, unlike this run: set lora.rank as it was")
    state = checkpoint.read_state(folder)
    changes = _differences(config, state, facts["content"])
    if changes and not config.checkpoint.accept_changes:
        listed = "; ".join(f"{key}: checkpoint {old!r}, now {new!r}" for key, old, new in changes)
        raise ConfigError(
            f"{config.output_dir} was started with other settings ({listed}): "
            "use another output_dir, the old values, or checkpoint.accept_changes=true"
        )
    if not is_inside(folder, config):
        # A branch of a run in another folder: that run's wandb run and best checkpoint are not
        # continued.
        state = state | {"best": None, "wandb_run_id": None}
    facts["origin"] = facts["origin"] or state["origin"]
    return StartPoint(folder, facts, state, changes)


def is_inside(folder: Path, config: Config) -> bool:
    """True if a checkpoint lies in the run's own folder."""
    return folder.parent.resolve() == Path(config.output_dir).resolve()


def _differences(
    config: Config,
    state: dict[str, Any],
    content: dict[str, str],
) -> list[tuple[str, Any, Any]]:
    """``(key, old, new)`` for each setting, and each content of rows or a file, that must not
    change and does."""
    before = flat(state["config"])
    now = settings_except("may change when a run continues", config)
    for name in sorted(state["content"].keys() | content.keys()):
        key = f"content of {name}"
        before[key] = state["content"].get(name, "missing")[:12]
        now[key] = content.get(name, "missing")[:12]
    changes = []
    for key, value in now.items():
        old = before.get(key, "missing")
        if old != value:
            changes.append((key, old, value))
    return changes


def start_output(
    config: Config,
    start_checkpoint: Path | None,
    lock: Lock,
) -> None:
    """Create and lock ``output_dir``, write the configuration, move aside what this run does not
    continue."""
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    lock.acquire(output)
    if start_checkpoint is not None and is_inside(start_checkpoint, config):
        # Later checkpoints are broken or of steps that this run computes again: `auto` must not
        # choose them.
        start_step = checkpoint.read_state(start_checkpoint)["step"]
        not_continued = [
            folder for step, folder in checkpoint.list_checkpoints(output) if step > start_step
        ]
    else:
        not_continued = [path for pattern in OF_A_RUN for path in output.glob(pattern)]
    if not_continued:
        aside = output / f"previous-{1 + len(list(output.glob('previous-*')))}"
        aside.mkdir()
        for path in not_continued:
            shutil.move(path, aside / path.name)
        print(f"an earlier run in {output} was moved to {aside}")
    resolved = yaml.safe_dump(config.for_saving(), sort_keys=False, allow_unicode=True)
    resolved = resolved.replace("\ngiven:", f"\n{ABOUT_GIVEN}\ngiven:")
    write_atomically(output / "config.yaml", resolved)

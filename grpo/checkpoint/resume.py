"""Start of a run: the output folder, the checkpoint to continue from, and the settings that must
not change when a run continues."""

import contextlib
import fcntl
import hashlib
import inspect
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo.checkpoint.format import (
    find_newest_valid,
    list_checkpoints,
    read_state,
    recover,
    why_invalid,
)
from grpo.config import Config, ConfigError, flat, settings_except
from grpo.model import file_digest, is_adapter, model_digests
from grpo.rewards import RewardRunner
from grpo.system import write_atomically

COMMENT_ON_ENTRY_GIVEN = """\
# What was set. A run that has this file as --config begins from it: what a preset or another key
# implied follows anew. Change a value here and above, or remove one of the two."""
"""Comment in ``config.yaml`` above the entry ``given``, which holds the values that the user
set."""
RUN_FILE_PATTERNS = (
    "checkpoint-*",
    "metrics.jsonl",
    "intervals.jsonl",
    "completions",
    "starts.jsonl",
    "tensorboard",
    "config.yaml",
)
"""Patterns of the files that a run writes into ``output_dir``. A later run in the same folder would
overwrite these files."""


class Lock:
    """Lock of an output folder. The main rank holds the lock during the run, so that no other run
    writes into the folder.

    The file ``.lock`` stays after the run. It names the process that holds the lock, or held it
    last.
    """

    # The file stays open for the whole run: the kernel releases the lock when the process ends,
    # even by a kill.
    _file = None

    def acquire(self, folder: Path) -> None:
        """Lock an existing folder, unless this object has locked it already. Raise a ConfigError if
        another run holds the lock."""
        if self._file is not None:
            return
        # Mode "a+", since "w" would delete the name of the holder before this process has the lock.
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
        # A network file system without locks must not prevent a run.
        except OSError as error:
            print(f"warning: {folder} cannot be locked ({error}): start no second run there")
        file.truncate(0)
        file.write(f"{os.getpid()}\n{socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock after the run, so that a later run in the same process can use the
        folder."""
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class StartPoint:
    """The checkpoint that a run starts from, and facts about the run that saved it."""

    checkpoint: Path | None
    """Folder of the checkpoint; None if the run starts from scratch, at step 0."""
    facts: dict[str, Any]
    """Facts that each checkpoint of this run saves, for comparison at the next start. ``origin`` is
    the checkpoint folder that ``checkpoint.resume`` names; with ``never`` it identifies the launch
    of torchrun. ``content`` has the digests of dataset rows and files by name."""
    state: dict[str, Any]
    """State from the checkpoint's ``trainer/state.json``; empty if the run starts from scratch."""
    changes: list[tuple[str, Any, Any]]
    """``(key, old, new)`` of each setting or file that has changed since the checkpoint was saved.
    ``checkpoint.accept_changes=true`` allows these changes."""


def find_checkpoint(config: Config, lock: Lock) -> tuple[Path | None, str | None]:
    """Choose the checkpoint to start from, and lock ``output_dir`` if it exists.

    The choice depends on ``checkpoint.resume``:

    - ``auto``: continue from the newest checkpoint in ``output_dir``, if there is one.
    - FOLDER: start a new run from the checkpoint in FOLDER. The same command, started again after
      an interruption, continues this new run from the newest checkpoint in ``output_dir``.
    - ``never``: start from scratch. If torchrun then restarts its processes, they continue the run.

    Returns:
        The checkpoint's folder (None to start from scratch), and the ``origin`` of
        :class:`StartPoint`. The origin is set for FOLDER, and for ``never`` under torchrun.
        Otherwise the origin is None.

    Raises:
        ConfigError: if FOLDER is not a valid checkpoint, if ``auto`` finds only broken checkpoints,
            or if ``output_dir`` is in use or cannot be written.
    """
    output = Path(config.output_dir)
    resume = config.checkpoint.resume
    # The folder is created later, when all cheap checks have passed. A folder that cannot be
    # created is refused now, before models are loaded.
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={output}: {existing} is no folder, or cannot be written")
    # Locked before recover(), which would delete the checkpoint that another run is writing.
    if output.is_dir():
        lock.acquire(output)
        recover(output)
    newest = find_newest_valid(output)
    if resume == "auto":
        # Starting from scratch would silently lose the training so far.
        if not newest and list_checkpoints(output):
            raise ConfigError(
                f"no checkpoint in {output} is valid: checkpoint.resume=never starts anew"
            )
        return newest, None

    start = None
    origin = None
    if resume == "never":
        launch = os.environ.get("TORCHELASTIC_RUN_ID")
        # Two launches may have the same id (--rdzv-id), but not the same torchrun process. This
        # process restarts the ranks, and stays.
        if launch:
            origin = f"torchrun {launch}, process {os.getppid()}"
    else:
        start = Path(resume).resolve()
        origin = str(start)
    if newest and origin and read_state(newest)["origin"] == origin:
        return newest, origin
    problem = why_invalid(start) if start else None
    if problem:
        raise ConfigError(
            f"checkpoint.resume={problem}; use auto, never, or a whole checkpoint folder"
        )
    return start, origin


def content_digests(
    config: Config,
    model_path: str,
    rewards: RewardRunner,
    reference_path: str | None,
    user_files: dict[str, str],
    user_objects: dict[str, Any],
) -> dict[str, str]:
    """Return the digests, by name, of models and of the user's code, which a continued run reads
    again. The digest of a model from the Hub is its commit.

    Args:
        model_path: folder or Hub id of ``model.name_or_path``.
        rewards: runner that has loaded the reward functions.
        reference_path: folder or Hub id of ``model.reference``; None if the reference is the model
            that training starts from.
        user_files: paths of the source files of tools, environments, loss and advantages, by the
            names that messages show.
        user_objects: what a program passes, by name. Of a function or class, the source code has
            a digest. Other objects, such as a partial, have none.
    """
    # The keys are the names in the configuration, since paths differ between machines.
    model = config.model
    model_paths = {
        model.adapter: model.adapter,
        model.reference: reference_path,
        # The model is the last entry, so that it replaces a reference of the same name: with beta
        # 0, reference_path is None.
        model.name_or_path: model_path,
    }
    digests = {}
    for name, path in model_paths.items():
        if path is not None:
            digests |= model_digests(name, path)
    for name, path in (rewards.source_files | user_files).items():
        digests[name] = file_digest(path)
    for name, value in user_objects.items():
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(value)
            digests[name] = hashlib.sha256(source.encode()).hexdigest()
    return digests


def read_start_point(config: Config, folder: Path | None, facts: dict[str, Any]) -> StartPoint:
    """Read the state of the checkpoint in ``folder``, and compare the settings. With None for
    ``folder`` the run starts from scratch.

    Raises:
        ConfigError: if a setting or file differs from the run that saved the checkpoint, unless
            ``checkpoint.accept_changes`` is true; or if only one of the two runs trains a LoRA
            adapter.
    """
    if folder is None:
        return StartPoint(None, facts, {}, [])
    # This check comes first: accept_changes cannot help, since an adapter does not fit a run that
    # trains all weights, nor the reverse.
    if is_adapter(folder) != config.uses_lora:
        kind = "all weights" if config.uses_lora else "a LoRA adapter"
        raise ConfigError(f"{folder} holds {kind}, unlike this run: set lora.rank as it was")
    state = read_state(folder)
    changes = _differences(config, state, facts["content"])
    if changes and not config.checkpoint.accept_changes:
        listed = "; ".join(f"{key}: checkpoint {old!r}, now {new!r}" for key, old, new in changes)
        raise ConfigError(
            f"{config.output_dir} was started with other settings ({listed}): "
            "use another output_dir, the old values, or checkpoint.accept_changes=true"
        )
    if not is_in_output_dir(folder, config):
        # This run is a branch of a run in another folder. The earlier run keeps its wandb run and
        # its best checkpoint, which this run must not continue or delete.
        state = state | {"best": None, "wandb_run_id": None}
    # A run that `auto` continues keeps the origin that an earlier command gave it.
    facts["origin"] = facts["origin"] or state["origin"]
    return StartPoint(folder, facts, state, changes)


def is_in_output_dir(folder: Path, config: Config) -> bool:
    """True if the checkpoint in ``folder`` lies in the output folder of this run."""
    return folder.parent.resolve() == Path(config.output_dir).resolve()


def _differences(
    config: Config,
    state: dict[str, Any],
    content: dict[str, str],
) -> list[tuple[str, Any, Any]]:
    """Return ``(key, old, new)`` for each setting that has changed but must not, and for each file
    or dataset whose content has changed."""
    old_values = flat(state["config"])
    new_values = settings_except("may change when a run continues", config)
    # A rate that is constant, after a warm-up of whole updates, does not depend on the number of
    # steps.
    optim = config.optim
    if optim.lr_scheduler_type == "constant" and not optim.warmup_steps % 1:
        del new_values["optim.max_steps"], new_values["optim.num_epochs"]
    for name in sorted(state["content"].keys() | content.keys()):
        key = f"content of {name}"
        # Twelve digits tell two digests apart, and fit into a message.
        old_values[key] = state["content"].get(name, "not read")[:12]
        new_values[key] = content.get(name, "not read")[:12]
    changes = []
    for key, new in new_values.items():
        # A key that is newer than the checkpoint counts as changed: its default may change
        # training.
        old = old_values.get(key, "missing")
        if old != new:
            changes.append((key, old, new))
    return changes


def start_output(config: Config, start_checkpoint: Path | None, lock: Lock) -> None:
    """Create and lock ``output_dir``, move the files that this run does not continue into
    ``previous-<n>/``, and write ``config.yaml``."""
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    lock.acquire(output)
    not_continued = []
    if start_checkpoint is not None and is_in_output_dir(start_checkpoint, config):
        # Later checkpoints are broken, or belong to steps that this run computes again. The next
        # start with `auto` must not continue from a later checkpoint.
        start_step = read_state(start_checkpoint)["step"]
        not_continued = [folder for step, folder in list_checkpoints(output) if step > start_step]
    else:
        for pattern in RUN_FILE_PATTERNS:
            not_continued += output.glob(pattern)
    # The files are moved, not deleted: they may be the result of days of training.
    if not_continued:
        earlier = list(output.glob("previous-*"))
        aside = output / f"previous-{len(earlier) + 1}"
        aside.mkdir()
        for path in not_continued:
            shutil.move(path, aside / path.name)
        print(f"an earlier run in {output} was moved to {aside}")
    text = yaml.safe_dump(config.values_to_save(), sort_keys=False, allow_unicode=True)
    text = text.replace("\ngiven:", f"\n{COMMENT_ON_ENTRY_GIVEN}\ngiven:")
    write_atomically(output / "config.yaml", text)

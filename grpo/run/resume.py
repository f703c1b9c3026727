"""The start of a run: from scratch, or from the checkpoint that ``checkpoint.resume`` selects; and settings that must not change then."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.config import SERVER_KEYS, Config, ConfigError
from grpo.distributed import launch_environment
from grpo.run import checkpoint
from grpo.run.adapters import check_same_kind
from grpo.run.lock import Lock
from grpo.run.output_folder import check_output_dir
from grpo.run.saver import CHOSEN
from grpo.system import open_regular
from grpo.system.masking import masked

MUST_NOT_CHANGE = (
    "seed", "model.name_or_path", "model.reference", "model.adapter", "model.disable_dropout", "model.fp32_head",
    "model.attn_implementation", "lora", "data", "reward.functions", "rollout", "algorithm", "optim", "runtime.precision",
)  # fmt: skip
"""Settings that a resumed run must share with its checkpoint to be the same run."""
MAY_CHANGE = ("optim.reduce_each_microbatch", *(f"rollout.{key}" for key in SERVER_KEYS))
"""Settings in those sections that trade memory for communication, or say where servers are: the run stays the same up to rounding."""


@dataclass(frozen=True)
class StartPoint:
    checkpoint: Path | None = None
    """None: from scratch, at step 0."""
    origin: dict[str, str | None] | None = None
    """The checkpoint folder that ``checkpoint.resume`` names, or for ``never`` this launch of torchrun; saved in every checkpoint."""
    state: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's state (``trainer/state.json``); empty from scratch."""
    changes: list[tuple[str, Any, Any]] = field(default_factory=list)
    """``(key, old, new)`` of all that differs from the checkpoint's run and that ``checkpoint.accept_changes`` accepts."""


def find_checkpoint(config: Config, lock: Lock) -> tuple[Path | None, dict[str, str | None] | None]:
    """The checkpoint to continue from (None: from scratch) and the origin, see :class:`StartPoint`. Locks ``output_dir`` if it exists.

    A command that names a checkpoint folder starts from it once: the same command, started again after an interruption,
    continues its own run instead. The same holds for ``never`` when torchrun restarts its processes.

    Raises:
        ValueError: if the folder that the command names is not a valid checkpoint, or ``output_dir`` is in use or not a run's.
    """
    output, resume = Path(config.output_dir), config.checkpoint.resume
    check_output_dir(output)
    if output.is_dir():
        lock.acquire(output)
        checkpoint.recover(output)
    origin = _origin(config)
    begun = origin and _newest_from(origin, config)
    if resume == "never" or begun:
        return begun, origin
    if resume == "auto":
        folder, warnings = checkpoint.find_newest_valid(output)
        for warning in warnings:
            print(f"warning: {warning}", flush=True)
        return folder, None
    if not Path(resume).is_dir():
        raise ConfigError(f"checkpoint.resume={resume}: no such folder; use auto, never, or a checkpoint-<step> folder")
    try:
        checkpoint.verify(resume)
    except checkpoint.BrokenCheckpoint as broken:
        raise ConfigError(f"checkpoint.resume={broken}; use auto, never, or a whole checkpoint-<step> folder") from None
    return Path(resume).resolve(), origin


def read_start_point(
    config: Config,
    folder: Path | None,
    origin: dict[str, str | None] | None,
    data_fingerprint: str,
    content: dict[str, str],
) -> StartPoint:
    """Read the checkpoint's state; ConfigError lists settings and files that differ, unless ``checkpoint.accept_changes`` allows it."""
    if folder is None:
        return StartPoint(origin=origin)
    check_same_kind(config, folder)
    state = checkpoint.read_state(folder)
    differences = _differences(config, state, data_fingerprint, content)
    if differences and not config.checkpoint.accept_changes:
        listed = "; ".join(f"{key}: checkpoint {old!r}, now {new!r}" for key, old, new in differences)
        listed += _from_problems_per_rank(config, state, differences)
        raise ConfigError(
            f"{config.output_dir} was started with other settings ({listed}): "
            "use another output_dir, the old values, or checkpoint.accept_changes=true"
        )
    if folder.parent.resolve() != Path(config.output_dir).resolve():
        # A branch of a run in another folder: that run's wandb run and best checkpoint are not continued.
        state = state | {"best": None, "wandb_run_id": None}
    return StartPoint(folder, origin or state.get("origin"), state, differences)


def _from_problems_per_rank(config: Config, state: dict[str, Any], differences: list[tuple[str, Any, Any]]) -> str:
    """The key that the user wrote, where a step has another size because ``rollout.prompts_per_rank`` is multiplied by other ranks."""
    key, before, now = "rollout.prompts_per_step", state.get("world_size"), launch_environment()[1]
    size = next((new for name, _, new in differences if name == key), None)
    if size is None or "prompts_per_rank" not in config.rollout.model_fields_set or before in (None, now):
        return ""
    return f", that is rollout.prompts_per_rank={size // now} on {now} rank(s), the checkpoint's were {before}"


def print_differences(start: StartPoint, world_size: int, threads: int | None, versions: dict[str, str]) -> None:
    """List the accepted changes, and warn of differences from the checkpoint's run that may change the last bits of the results.

    ``threads`` is None on CUDA, where the number of CPU threads changes no bit.
    """
    state = start.state
    if start.changes:
        listed = "; ".join(f"{key}: {old} -> {new}" for key, old, new in start.changes)
        print(f"note: checkpoint.accept_changes accepts {listed}", flush=True)
    if state.get("world_size", world_size) != world_size:
        sizes = f"the checkpoint is from {state['world_size']} rank(s), now there are {world_size}"
        print(f"note: {sizes}: the same problems and completions, the same weights to rounding", flush=True)
    before = state.get("threads_per_rank", threads)
    if threads is not None and before != threads:
        counts = f"the checkpoint was computed with {before} CPU thread(s) per rank, this run has {threads}"
        remedy = f"runtime.threads_per_rank={before} keeps the bits"
        print(f"note: {counts}: results can differ in rounding; {remedy}", flush=True)
    old = state.get("versions", {})
    if changed := [f"{name} {old[name]} -> {now}" for name, now in versions.items() if old.get(name, now) != now]:
        print(f"warning: {', '.join(changed)} since the checkpoint: the bits of this run may differ", flush=True)


def _origin(config: Config) -> dict[str, str | None] | None:
    """A checkpoint folder and the digest of its manifest while it exists; or, for ``never``, this launch of torchrun."""
    resume = config.checkpoint.resume
    if resume == "auto":
        return None
    if resume == "never":
        run_id, parent = os.environ.get("TORCHELASTIC_RUN_ID"), os.getppid()
        return run_id and {"place": f"torchrun {run_id} {parent} {_start_time(parent)}", "digest": None}
    origin = {"place": str(Path(resume).resolve()), "digest": None}
    with contextlib.suppress(OSError), open_regular(Path(origin["place"], checkpoint.MANIFEST)) as file:
        origin["digest"] = hashlib.file_digest(file, "sha256").hexdigest()
    return origin


def _start_time(pid: int) -> str:
    """The start time of a process in clock ticks since boot (Linux; else empty), because process ids are reused."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _newest_from(origin: dict[str, str | None], config: Config) -> Path | None:
    """The newest valid checkpoint in ``output_dir`` of a run with this origin and the same settings."""
    output = Path(config.output_dir).resolve()
    lies_here = Path(origin["place"]).parent == output
    for _, folder in checkpoint.list_checkpoints(output):
        with contextlib.suppress(checkpoint.BrokenCheckpoint):
            state = checkpoint.read_state(folder)
            saved = state.get("origin")
            if not isinstance(saved, dict) or saved.get("place") != origin["place"]:
                continue
            # The named checkpoint may have been deleted since, as old checkpoints are; in its own folder it may have been written again.
            same_content = lies_here or origin["digest"] in (None, saved.get("digest"))
            if same_content and not _differences(config, state):
                checkpoint.verify(folder)
                return folder
    return None


def _differences(
    config: Config, state: dict[str, Any], data_fingerprint: str | None = None, content: dict[str, str] | None = None
) -> list[tuple[str, Any, Any]]:
    """``(key, old, new)`` for each setting, and for the data and the files (``content``), that must not change and does."""
    saved, now = masked(state.get("config", {})), config.for_writing()
    pairs: list[tuple[str, Any, Any]] = []
    if data_fingerprint is not None:
        pairs.append(("data_fingerprint", state.get("data_fingerprint", data_fingerprint), data_fingerprint))
    saved_content = state.get("content")  # checkpoints of earlier versions have none
    if content is not None and isinstance(saved_content, dict):
        pairs += _content_differences(saved_content, content)
    for key, name in CHOSEN.items():  # setting what the run chose itself is no change
        section, _, leaf = key.partition(".")
        if now[section][leaf] == state.get(name) and isinstance(saved.get(section), dict):
            saved[section][leaf] = now[section][leaf]
    for key in MUST_NOT_CHANGE:
        section, _, leaf = key.partition(".")
        new = now[section]
        old = saved.get(section, {} if isinstance(new, dict) else None)  # a section that is missing: all defaults
        if leaf:
            old, new = old.get(leaf) if isinstance(old, dict) else None, new[leaf]
        if isinstance(old, dict) and isinstance(new, dict):
            # A key that the checkpoint's version did not have counts as its default.
            defaults = Config().model_dump(mode="json")[section] if not leaf else {}
            pairs += [(f"{key}.{name}", old.get(name, defaults.get(name)), new[name]) for name in new]
        else:
            pairs.append((key, old, new))
    return [(key, old, new) for key, old, new in pairs if old != new and key not in MAY_CHANGE]


def _content_differences(saved: dict[str, str], now: dict[str, str]) -> list[tuple[str, str, str]]:
    """``(name, old, new)`` for each file that differs. A folder that is missing, or new, is one entry for all of its files."""
    changed = [
        (f"content of {name}", "as it was", "changed") for name in saved.keys() & now.keys() if saved[name] != now[name]
    ]
    for ends, names in (
        (("as it was", "missing"), saved.keys() - now.keys()),
        (("missing", "new"), now.keys() - saved.keys()),
    ):
        folders = Counter(map(os.path.dirname, names))
        alone = [f"content of {name}" for name in names if folders[os.path.dirname(name)] == 1]
        whole = [f"content of {folder} ({count} files)" for folder, count in folders.items() if count > 1]
        changed += [(name, *ends) for name in alone + whole]
    return sorted(changed)

"""The output folder of a run: whether it may be used, what it is continued from, how it is begun."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from grpo.config import Config, ConfigError
from grpo.run import checkpoint
from grpo.run.lock import NAME as LOCK
from grpo.run.lock import Lock

MUST_NOT_CHANGE = (
    "seed", "model.name_or_path", "model.disable_dropout", "model.fp32_head", "model.attn_implementation", "data",
    "reward.functions", "rollout", "algorithm", "optim", "runtime.precision",
)  # fmt: skip
"""What a resumed run must share with its checkpoint to be the same run."""


def find_resume_point(config: Config, lock: Lock) -> tuple[Path | None, dict[str, str | None] | None]:
    """The checkpoint to continue from, by ``checkpoint.resume``. From here on ``output_dir``, if it exists, is locked.

    A command that names a folder begins there once: given again after an interruption, it continues what it began. So does one with
    ``never`` when torchrun starts its processes again.

    Returns:
        The checkpoint, and what a run that does not begin by ``auto`` began from; it is kept in its checkpoints.

    Raises:
        ConfigError: if a folder named explicitly is not a whole checkpoint, or ``output_dir`` holds something else.
        ValueError: if another run is at work there.
    """
    output, resume = Path(config.output_dir), config.checkpoint.resume
    check_place(output)
    if output.is_dir():
        # A run that was killed while it began leaves its lock and a config.yaml half written; one whose folder was deleted under
        # it, a checkpoint.
        inside = sorted(path.name for path in output.iterdir() if path.name not in (LOCK, "config.yaml.tmp"))
        ours = "config.yaml" in inside or any(
            (folder / checkpoint.MANIFEST).exists() for _, folder in checkpoint.list_checkpoints(output)
        )
        if inside and not ours:
            raise ConfigError(
                f"output_dir={output} holds something that is not a run ({', '.join(inside[:4])}): choose another folder"
            )
        lock.acquire(output)
        checkpoint.recover(output)
    origin = _origin_of(config)
    begun = origin and _newest_begun_by(origin, config)
    if resume == "never" or begun:
        return begun, origin
    if resume != "auto":
        if not Path(resume).is_dir():
            raise ConfigError(
                f"checkpoint.resume={resume}: no such folder; use auto, never, or a checkpoint-<step> folder"
            )
        try:
            checkpoint.verify(resume)
        except checkpoint.BrokenCheckpoint as broken:
            raise ConfigError(
                f"checkpoint.resume={broken}; use auto, never, or a whole checkpoint-<step> folder"
            ) from None
        return Path(resume).resolve(), origin
    folder, warnings = checkpoint.find_newest_valid(output)
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    return folder, None


def _origin_of(config: Config) -> dict[str, str | None] | None:
    """A checkpoint's place, and the digest of its manifest while it is there; or this start of torchrun."""
    resume = config.checkpoint.resume
    if resume == "auto":
        return None
    if resume == "never":
        run_id = os.environ.get("TORCHELASTIC_RUN_ID")
        return run_id and {"place": f"torchrun {run_id} {os.getppid()} {_started(os.getppid())}", "digest": None}
    folder = Path(resume).resolve()
    try:
        digest = hashlib.sha256((folder / checkpoint.MANIFEST).read_bytes()).hexdigest()
    except OSError:
        digest = None
    return {"place": str(folder), "digest": digest}


def _started(pid: int) -> str:
    """When a process began, as far as Linux tells: numbers of processes come again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _newest_begun_by(origin: dict[str, str | None], config: Config) -> Path | None:
    """The newest whole checkpoint in ``output_dir`` of a run that began there, under the same settings."""
    output = Path(config.output_dir).resolve()
    for _, folder in checkpoint.list_checkpoints(output):
        try:
            state = checkpoint.read_state(folder)
            theirs = state.get("origin")
            if not isinstance(theirs, dict):
                continue
            # The checkpoint that was named may have been deleted since, as all are in their turn; in its own folder it may have been
            # written again.
            is_own = Path(origin["place"]).parent == output
            same = is_own or origin["digest"] in (None, theirs.get("digest"))
            if theirs.get("place") == origin["place"] and same and not _differences(config, state, {}):
                checkpoint.verify(folder)
                return folder
        except checkpoint.BrokenCheckpoint:
            continue
    return None


def check_place(output: Path) -> None:
    """Refuse an ``output_dir`` that is a file or cannot be written; nothing is created to find out.

    Raises:
        ConfigError: naming the folder that stands in the way.
    """
    existing = next(place for place in (output, *output.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise ConfigError(
            f"output_dir={output} is a file: choose a folder"
            if existing == output
            else f"output_dir={output} cannot be made: {existing} is a file, not a folder"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={output} cannot be written: no permission in {existing}")


def refuse_changes(config: Config, state: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Refuse to continue a run under settings or on data that would make it another one, listing each difference.

    Args:
        state: of the checkpoint; facts: what it must share with the run that continues it, beside the configuration.

    Returns:
        Whether there are differences, which ``checkpoint.accept_changes`` takes.

    Raises:
        ConfigError: if there are, and it does not.
    """
    differences = _differences(config, state, facts)
    if differences and not config.checkpoint.accept_changes:
        raise ConfigError(
            f"{config.output_dir} was started with other settings ({'; '.join(differences)}): "
            "use another output_dir, the old values, or checkpoint.accept_changes=true"
        )
    return bool(differences)


def _differences(config: Config, state: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    saved, now = state.get("config", {}), config.model_dump(mode="json")
    differences = [
        f"{name}: checkpoint {state[name]!r}, now {value!r}"
        for name, value in facts.items()
        if state.get(name, value) != value
    ]
    for key in MUST_NOT_CHANGE:
        section, _, leaf = key.partition(".")
        old, new = saved.get(section), now[section]
        if leaf:
            old, new = old.get(leaf) if isinstance(old, dict) else None, new[leaf]
        if old != new:
            both = isinstance(old, dict) and isinstance(new, dict)
            pairs = (
                [(f"{key}.{k}", old.get(k), new[k]) for k in new if old.get(k) != new[k]] if both else [(key, old, new)]
            )
            differences += [f"{name}: checkpoint {before!r}, now {after!r}" for name, before, after in pairs]
    return differences


def note_differences(state: dict[str, Any], now: dict[str, Any]) -> None:
    """Say what may differ from the run that made the checkpoint, but does not make another run of it."""
    if state.get("world_size", now["world_size"]) != now["world_size"]:
        print(
            f"note: the checkpoint is from {state['world_size']} rank(s), now there are {now['world_size']}: the same problems "
            "and completions, the same weights to rounding",
            flush=True,
        )
    old, new = state.get("versions", {}), now["versions"]
    changed = [f"{name} {old[name]} -> {new[name]}" for name in new if old.get(name, new[name]) != new[name]]
    if changed:
        print(f"warning: {', '.join(changed)} since the checkpoint: the bits of this run may differ", flush=True)


def start_output(config: Config, resume: Path | None, lock: Lock) -> None:
    """Create ``output_dir`` with the resolved config; set an earlier run's results aside if this one starts afresh."""
    output = Path(config.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={output} cannot be made: {error.strerror}") from None
    lock.acquire(output)
    leftovers = [*output.glob("checkpoint-*"), *output.glob("metrics.jsonl"), *output.glob("completions")]
    continues = resume is not None and resume.parent.resolve() == output.resolve()
    if not continues and any(path.name.startswith("checkpoint-") or path.name == "metrics.jsonl" for path in leftovers):
        number = 1 + len(list(output.glob("previous-*")))
        aside = output / f"previous-{number}"
        aside.mkdir()
        for path in [*leftovers, *(output / name for name in ("config.yaml", "run.json", "intervals.jsonl"))]:
            if path.exists():
                shutil.move(path, aside / path.name)
        print(f"an earlier run in {output} was moved to {aside}", flush=True)
    if continues:
        # Continued from an earlier step: what lies after it is broken or another branch, and `auto` must not pick it later.
        from_step = checkpoint.read_state(resume)["step"]
        for step, folder in checkpoint.list_checkpoints(output):
            if step > from_step:
                aside = output / f"previous-{1 + len(list(output.glob('previous-*')))}"
                aside.mkdir()
                shutil.move(folder, aside / folder.name)
                print(f"{folder}, which is not continued, was moved to {aside}", flush=True)
    temporary = output / "config.yaml.tmp"
    temporary.write_text(
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    os.replace(temporary, output / "config.yaml")

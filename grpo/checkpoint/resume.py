"""The start of a run: from scratch or from a checkpoint; and settings that must not change then."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.checkpoint import format as checkpoint
from grpo.checkpoint.output_folder import Lock, check_output_dir
from grpo.checkpoint.saver import CHOSEN
from grpo.config import SERVER_KEYS, Config, ConfigError
from grpo.config.secrets import masked
from grpo.model import digest, is_adapter, model_digests
from grpo.rewards import RewardRunner

MUST_NOT_CHANGE = (
    "seed", "model.name_or_path", "model.reference", "model.adapter", "model.disable_dropout",
    "model.attn_implementation", "lora", "data", "reward.functions", "rollout", "algorithm", "optim",
    "runtime.precision",
)  # fmt: skip
"""Settings that a resumed run must share with its checkpoint to be the same run."""
MAY_CHANGE = ("optim.reduce_each_microbatch", *(f"rollout.{key}" for key in SERVER_KEYS))
"""Settings in those sections that leave the run the same up to rounding."""


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


def find_checkpoint(config: Config, lock: Lock) -> tuple[Path | None, str | None]:
    """The checkpoint to continue from (None: from scratch) and the origin; locks ``output_dir`` if it exists.

    A command that names a checkpoint folder starts from it once: the same command, started again after an interruption,
    continues its own run instead. The same holds for ``never`` when torchrun restarts its processes.

    ValueError if that folder is not a valid checkpoint, or ``output_dir`` is in use or not a run's.
    """
    output, resume = Path(config.output_dir), config.checkpoint.resume
    if resume not in ("auto", "never"):
        resume = str(Path(resume).resolve())
    check_output_dir(output)
    newest, warnings = None, []
    if output.is_dir():
        lock.acquire(output)
        checkpoint.recover(output)
        newest, warnings = checkpoint.find_newest_valid(output)
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    origin = {"auto": None, "never": launch and f"torchrun {launch}, process {os.getppid()}"}.get(resume, resume)
    if resume != "auto":
        has_begun = newest is not None and origin is not None and checkpoint.read_state(newest)["origin"] == origin
        if has_begun or resume == "never":
            return newest if has_begun else None, origin
        try:
            checkpoint.verify(resume)
        except checkpoint.BrokenCheckpoint as broken:
            raise ConfigError(f"checkpoint.resume={broken}; use auto, never, or a whole checkpoint folder") from None
        return Path(resume), origin
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    return newest, None


def content_digests(
    config: Config, model_path: str, rewards: RewardRunner, reference_path: str | None = None
) -> dict[str, str]:
    """Digests of what a continued run reads again: files of models and rewards; commits of models of the Hub.

    Args:
        model_path: the folder or Hub id that ``model.name_or_path`` stands for.
        rewards: its functions are loaded; those given as objects have no digest.
        reference_path: what ``model.reference`` stands for; None if the reference is the model of the start.
    """
    # The policy's weights come from the checkpoint; those of the start are read again for a reference or an adapter.
    is_reference = config.algorithm.beta > 0 and reference_path is None
    found = model_digests(config.model.name_or_path, model_path, with_weights=is_reference or config.uses_lora)
    others = {config.model.adapter: config.model.adapter, **{name: name for name in rewards.classifier_models}}
    if reference_path is not None:
        others[config.model.reference] = reference_path
    for name, path in others.items():
        found |= model_digests(name, path, with_weights=True) if name is not None else {}
    return found | {name: digest(path) for name, path in rewards.source_files.items()}


def read_start_point(
    config: Config, folder: Path | None, origin: str | None, data_fingerprint: str, content: dict[str, str]
) -> StartPoint:
    """Read the checkpoint's state; ConfigError lists what differs, unless ``checkpoint.accept_changes``."""
    if folder is None:
        return StartPoint(origin=origin)
    if is_adapter(folder) != config.uses_lora:
        kind, remedy = "all weights", f"begin from it with model.name_or_path={folder}"
        if not config.uses_lora:
            kind, remedy = "a LoRA adapter", f"begin from the model that python -m grpo.merge {folder} writes"
        raise ConfigError(
            f"{folder} holds {kind}, unlike this run: set lora.rank as it was, or {remedy} in another output_dir"
        )
    state = checkpoint.read_state(folder)
    differences = _differences(config, state, data_fingerprint, content)
    if differences and not config.checkpoint.accept_changes:
        listed = "; ".join(f"{key}: checkpoint {old!r}, now {new!r}" for key, old, new in differences)
        raise ConfigError(
            f"{config.output_dir} was started with other settings ({listed}): "
            "use another output_dir, the old values, or checkpoint.accept_changes=true"
        )
    if folder.parent.resolve() != Path(config.output_dir).resolve():
        # A branch of a run in another folder: that run's wandb run and best checkpoint are not continued.
        state = state | {"best": None, "wandb_run_id": None}
    return StartPoint(folder, origin or state["origin"], state, differences)


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
    saved, now = masked(state["config"]), config.for_writing()
    pairs: list[tuple[str, Any, Any]] = [("data_fingerprint", state["data_fingerprint"], data_fingerprint)]
    for name in sorted(state["content"].keys() | content.keys()):
        old, new = (digests.get(name, "missing")[:12] for digests in (state["content"], content))
        pairs.append((f"content of {name}", old, new))
    for key, name in CHOSEN.items():  # setting what the run chose itself is no change
        section, _, leaf = key.partition(".")
        if now[section][leaf] == state.get(name):
            saved[section][leaf] = now[section][leaf]
    for key in MUST_NOT_CHANGE:
        section, _, leaf = key.partition(".")
        old, new = (values[section][leaf] if leaf else values[section] for values in (saved, now))
        if isinstance(new, dict):
            pairs += [(f"{key}.{name}", old.get(name), new[name]) for name in new]
        else:
            pairs.append((key, old, new))
    return [(key, old, new) for key, old, new in pairs if old != new and key not in MAY_CHANGE]

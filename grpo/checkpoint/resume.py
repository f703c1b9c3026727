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
    "seed", "model.name_or_path", "model.reference", "model.adapter", "model.disable_dropout", "model.fp32_head",
    "model.attn_implementation", "lora.", "data.", "reward.functions", "rollout.", "algorithm.", "optim.",
    "runtime.precision",
)  # fmt: skip
"""Settings (or sections) that a resumed run must share with its checkpoint to be the same run."""
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

    ConfigError if that folder is not a valid checkpoint, or ``output_dir`` is in use or not a run's.
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
        kind = "all weights" if config.uses_lora else "a LoRA adapter, which python -m grpo.merge makes a whole model"
        raise ConfigError(
            f"{folder} holds {kind}, unlike this run: set lora.rank as it was, or begin from the model "
            "(model.name_or_path) in another output_dir"
        )
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
    return StartPoint(folder, origin or state["origin"], state, changes)


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
    saved, now = _by_key(masked(state["config"])), _by_key(config.for_writing())
    for key, name in CHOSEN.items():  # setting what the run chose itself is no change
        if now[key] == state.get(name):
            saved[key] = now[key]
    fixed = [key for key in now if key.startswith(MUST_NOT_CHANGE) and key not in MAY_CHANGE]
    triples = [("data_fingerprint", state["data_fingerprint"], data_fingerprint)]
    for name in sorted(state["content"].keys() | content.keys()):
        old, new = (digests.get(name, "missing")[:12] for digests in (state["content"], content))
        triples.append((f"content of {name}", old, new))
    triples += [(key, saved.get(key), now[key]) for key in fixed]
    return [(key, old, new) for key, old, new in triples if old != new]


def _by_key(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration's values also by ``section.key``."""
    found = dict(values)
    for section, inside in values.items():
        if isinstance(inside, dict):
            found |= {f"{section}.{key}": value for key, value in inside.items()}
    return found

"""Digests of the files that a continued run reads again: reward functions, the model that training began with, and the reference model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from grpo.config import Config
from grpo.hub import commit_of
from grpo.rewards import RewardRunner
from grpo.system import open_regular

BLOCK, BLOCKS = 2**20, 64
"""Of a file of more than ``BLOCKS`` blocks of ``BLOCK`` bytes, this many blocks are read: the first, the last and evenly spread ones."""
WEIGHTS = (".safetensors", ".bin")
MODEL_FILES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt", *WEIGHTS)


def content_digests(
    config: Config, model_path: str, rewards: RewardRunner, reference_path: str | None = None
) -> dict[str, str]:
    """File -> SHA-256 (see :func:`digest`); for a model of the Hub its name -> the commit, if the cache knows it; and for a reward that was
    given as an object its name -> a digest of its code.

    Args:
        model_path: the folder or Hub id that ``model.name_or_path`` stands for.
        rewards: its functions are loaded.
        reference_path: the folder or Hub id that ``model.reference`` stands for; None if the reference is the model of the start.
    """
    # The policy's weights come from the checkpoint; those of the start are read again for the reference, and under an adapter.
    is_reference = config.algorithm.beta > 0 and reference_path is None
    found = _of_model(config.model.name_or_path, model_path, with_weights=is_reference or config.uses_lora)
    if config.model.adapter is not None:
        found |= _of_model(config.model.adapter, config.model.adapter, with_weights=True)
    if reference_path is not None:
        found |= _of_model(config.model.reference, reference_path, with_weights=True)
    for name in rewards.classifier_models:
        found |= _of_model(name, name, with_weights=True)
    return found | {name: digest(path) for name, path in rewards.source_files.items()} | rewards.digests


def _of_model(name: str, path: str, *, with_weights: bool) -> dict[str, str]:
    if not os.path.isdir(path):
        commit = commit_of(path)
        return {name: commit} if commit else {}
    suffixes = [suffix for suffix in MODEL_FILES if with_weights or suffix not in WEIGHTS]
    return {f"{name}/{file.name}": digest(file) for file in sorted(Path(path).iterdir()) if file.suffix in suffixes}


def digest(path: str | Path) -> str:
    """SHA-256 of a file's size and content; of a file above 64 MiB, of 64 blocks of 1 MiB, so that large models cost little time."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        found = hashlib.sha256(str(size).encode())
        if size <= BLOCK * BLOCKS:
            found.update(file.read())
        else:
            for number in range(BLOCKS):
                file.seek((size - BLOCK) * number // (BLOCKS - 1))
                found.update(file.read(BLOCK))
    return found.hexdigest()

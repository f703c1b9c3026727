"""LoRA in a run: the adapter that is trained, and a reference for the KL that needs no second model."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from grpo.config import Config, ConfigError
from grpo.logprobs import CompletionScorer
from grpo.model import Adapter, Policy, add_adapter, is_adapter, load_peft, read_adapter, read_adapter_config
from grpo.seeding import derive_seed

FROM_PEFT = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}
"""Keys of ``lora``, and the names that these settings have in ``adapter_config.json``."""


class AdapterReference(CompletionScorer):
    """Log-probs under the reference: the policy's own model with its adapter switched off, or with the adapter that training began with.

    It is called between updates and without gradient. The adapter is switched back also after an exception.
    """

    def __init__(self, policy: Policy, temperature: float, adapter: Adapter | None):
        """``adapter``: a frozen copy (:meth:`Adapter.frozen_copy`); None: the reference is the model without adapters."""
        super().__init__(policy.model, temperature)
        self.policy, self.adapter = policy, adapter

    def pack_groups(self) -> str | None:
        """Nothing to switch on: the model is the policy's."""
        self.packed = True

    def forward(self, *inputs, **named) -> tuple[torch.Tensor, torch.Tensor]:
        was_training = self.model.training
        self.model.eval()  # a frozen adapter has no dropout
        try:
            with torch.no_grad(), self.policy.adapter.switched_to(self.adapter):
                return super().forward(*inputs, **named)
        finally:
            self.model.train(was_training)

    def follow_policy(self) -> None:
        """Take the values of the trained adapter (``algorithm.ref_sync_steps``)."""
        self.adapter.load_state_dict(self.policy.adapter.state_dict())


def check_same_kind(config: Config, checkpoint: Path | None) -> None:
    """ConfigError if a run with adapters would continue a checkpoint that holds a whole model, or the reverse."""
    if checkpoint is None or is_adapter(checkpoint) == config.uses_lora:
        return
    if config.uses_lora:
        raise ConfigError(
            f"{checkpoint} holds all weights and this run trains a LoRA adapter: set lora.rank=0, or begin from it in another output_dir "
            f"with model.name_or_path={checkpoint}"
        )
    raise ConfigError(
        f"{checkpoint} holds a LoRA adapter and this run trains all weights: set lora.rank as it was, or begin from the model that "
        f"python -m grpo.merge {checkpoint} writes, in another output_dir"
    )


def check_adapter(config: Config) -> None:
    """ValueError if a run with adapters lacks peft, if ``model.adapter`` is no adapter folder, or if ``lora`` contradicts it."""
    if config.uses_lora:
        load_peft()
    folder, lora = config.model.adapter, config.lora
    if folder is None:
        return
    if not is_adapter(folder):
        raise ConfigError(
            f"model.adapter={folder} is no folder that holds adapter_config.json and adapter_model.safetensors"
        )
    found = read_adapter_config(folder, "model.adapter")
    defaults = type(lora)()
    for key, name in FROM_PEFT.items():
        wanted = getattr(lora, key)
        if wanted not in (getattr(defaults, key), found.get(name)):
            raise ConfigError(
                f"lora.{key}={wanted} contradicts model.adapter={folder}, which has {name}={found.get(name)}: leave lora.{key} out"
            )
    if lora.target_modules != defaults.target_modules and _names(lora.target_modules) != _names(
        found["target_modules"]
    ):
        raise ConfigError(
            f"lora.target_modules={lora.target_modules} contradicts model.adapter={folder}, which has {found['target_modules']}: leave "
            "lora.target_modules out"
        )


def _names(modules: str | list[str]) -> str | list[str]:
    return modules if isinstance(modules, str) else sorted(modules)


def make_adapter(config: Config, policy: Policy, path: str, checkpoint: Path | None) -> Adapter | None:
    """Put the run's adapter into the policy's model, with the values of the start or of the checkpoint.

    Returns the frozen adapter that the reference computes with; None if the reference is the model without adapters, or is not needed.

    Args:
        path: the folder or Hub id of the model.
    """
    lora, start, algorithm = config.lora, config.model.adapter, config.algorithm
    options = dict(base=os.path.abspath(path) if os.path.isdir(path) else path, base_precision=lora.base_precision)
    if start is not None:
        adapter = read_adapter(policy, start, setting="model.adapter", dropout=lora.dropout, **options)
    else:
        settings = dict(
            r=lora.rank,
            lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            use_rslora=lora.rslora,
            init_lora_weights=lora.init,
        )
        adapter = add_adapter(policy, settings, seed=derive_seed(config.seed, "lora"), **options)
    is_reference = algorithm.beta > 0 and config.model.reference is None
    frozen = adapter.frozen_copy() if is_reference and (start is not None or algorithm.ref_sync_steps) else None
    if checkpoint is not None:
        adapter.read(checkpoint, "checkpoint")
    return frozen

"""The models of a run: policy, reference, scorers, optimizer and learning-rate schedule, as they are at the step where the run starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from grpo.config import Config, ConfigError
from grpo.logprobs import CompletionScorer
from grpo.model import Policy, cast_reference_to_bf16, load_policy, make_reference
from grpo.run import checkpoint
from grpo.run.optimizer import make_lr_schedule, make_optimizer, settings_of, use_new_settings
from grpo.run.resume import StartPoint
from grpo.system import first_line


@dataclass(frozen=True)
class Models:
    """See :class:`grpo.run.state.Run` for the fields."""

    policy: Policy
    scorer: CompletionScorer
    ref_scorer: CompletionScorer | None
    optimizer: torch.optim.Optimizer
    lr_schedule: LRScheduler
    why_padded: str | None
    """The reason why scoring computes the prompt once per completion; None: it computes each prompt once per group."""


def build_models(
    config: Config, device: torch.device, path: str, tokenizer: Any, max_steps: int, start: StartPoint
) -> Models:
    """Load or restore everything that holds weights.

    Raises:
        ValueError: if the model cannot be loaded, or the checkpoint's optimizer state does not fit.
    """
    algorithm, settings = config.algorithm, config.optim
    options = dict(
        device=device, precision=config.runtime.precision, **config.model.model_dump(exclude={"name_or_path"})
    )
    policy = load_policy(str(start.checkpoint or path), tokenizer, **options)
    ref_scorer = None
    if algorithm.beta > 0:
        # The reference is the model that training began with, also when the policy continues from a checkpoint.
        anchor = load_policy(path, tokenizer, **options).model if start.checkpoint else policy.model
        ref_scorer = CompletionScorer(make_reference(anchor), config.rollout.temperature)
    optimizer = make_optimizer(
        policy.model,
        learning_rate=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )
    lr_schedule = make_lr_schedule(
        optimizer,
        name=settings.lr_scheduler_type,
        num_updates=max_steps * algorithm.updates_per_step,
        warmup_steps=settings.warmup_steps,
        min_lr=settings.min_lr,
    )
    moving_reference = ref_scorer.model if ref_scorer and algorithm.ref_sync_steps else None
    if start.checkpoint:
        _restore(config, device, start, optimizer, lr_schedule, moving_reference)
    policy.model.train()
    scorer = CompletionScorer(policy.model, config.rollout.temperature)
    why_padded = _enable_packing(config, scorer)
    if ref_scorer is not None:
        if scorer.packed:
            ref_scorer.pack_groups()
        ref_scorer.plain_head  # noqa: B018  measured now, while its weights are fp32
        if moving_reference is None:  # a reference that moves needs its fp32 weights
            cast_reference_to_bf16(ref_scorer.model, policy)
    return Models(policy, scorer, ref_scorer, optimizer, lr_schedule, why_padded)


def _restore(
    config: Config,
    device: torch.device,
    start: StartPoint,
    optimizer: torch.optim.Optimizer,
    lr_schedule: LRScheduler,
    reference: nn.Module | None,
) -> None:
    settings = settings_of(optimizer)
    try:
        checkpoint.restore(
            start.checkpoint,
            optimizer=optimizer,
            schedule=None if start.settings_changed else lr_schedule,
            reference=reference,
            device=device,
        )
    except (
        UnpicklingError,
        RuntimeError,
        ValueError,
        KeyError,
    ) as error:  # a valid checkpoint that another program made
        raise ConfigError(
            f"{start.checkpoint} cannot be continued from ({type(error).__name__}: {first_line(error)})"
        ) from None
    if start.settings_changed:
        num_updates = start.state["step"] * config.algorithm.updates_per_step
        use_new_settings(optimizer, lr_schedule, settings, num_updates=num_updates)


def _enable_packing(config: Config, scorer: CompletionScorer) -> str | None:
    """Score each prompt once per group if settings and model allow it; otherwise return the reason."""
    if not config.runtime.packed:
        return "runtime.packed is false"
    if not config.model.disable_dropout:
        return "model.disable_dropout is false, and attention over a packed row has no dropout"
    return scorer.pack_groups()


def any_forward(policy: Policy) -> Callable[[nn.Module], torch.Tensor]:
    """A forward pass of a scorer over one token, which uses every parameter of the policy (for ``wrap_data_parallel``)."""
    ids_BS = torch.tensor([[policy.pad_id, policy.pad_id]], device=policy.device)
    mask_BT = torch.ones(1, 1, dtype=torch.bool, device=policy.device)
    lengths_B = torch.ones(1, dtype=torch.long, device=policy.device)

    def forward(scorer: nn.Module) -> torch.Tensor:
        with policy.autocast():
            return scorer(ids_BS, lengths_B, mask_BT)[0].sum()

    return forward

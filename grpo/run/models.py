"""The models of a run, its optimizer and learning-rate schedule, as they are at the step where it
starts."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.seeding import derive_seed
from grpo.checkpoint import format as checkpoint
from grpo.checkpoint.resume import StartPoint
from grpo.config import Config, ConfigError
from grpo.distributed import World, compute_inside, shard
from grpo.model import (
    REFERENCE,
    Policy,
    check_base,
    decoder_layers,
    freeze_unreached,
    load_policy,
    lora,
    store_frozen_in_bf16,
)
from grpo.rollout import check_model
from grpo.rollout.weights import GatheredWeights
from grpo.run.optimizer import make_lr_schedule, make_optimizer, move_schedule


@dataclass(frozen=True)
class Models:
    policy: Policy
    scorer: CompletionScorer
    """Not yet wrapped in DDP; under FSDP the root group."""
    ref_scorer: CompletionScorer | lora.AdapterReference | None
    optimizer: torch.optim.Optimizer
    lr_schedule: LRScheduler
    why_padded: str | None
    """The reason why each prompt is scored once per completion; None: it is scored once per
    group."""
    moving_reference: dict[str, torch.Tensor]
    """The reference's weights by name, for checkpoints, if they change during training
    (``ref_sync_steps``)."""
    sampler: Policy
    """The policy that the built-in engine samples with: under FSDP its model is one of this rank
    alone."""
    gathered: GatheredWeights | None
    """Fills the sampler's model under FSDP; None: the sampler is the policy, or vLLM samples."""


def build_models(
    config: Config,
    world: World,
    path: str,
    tokenizer: Any,
    max_steps: int,
    start: StartPoint,
    reference_path: str | None = None,
) -> Models:
    """Load or restore everything that holds weights. All ranks call it together.

    Args: path: the folder or Hub id that ``model.name_or_path`` stands for. reference_path: what
        ``model.reference`` stands for; None: the reference is the model that training starts from.

    Raises: ValueError: on all ranks, if a model cannot be loaded, or if policy, reference and
        checkpoint do not fit.
    """
    algorithm = config.algorithm
    is_sharded = config.runtime.parallel == "fsdp" and not world.is_single_process
    # Loading for FSDP and its passes have collectives, which fail_together() may not hold.
    together = contextlib.nullcontext if is_sharded else world.fail_together

    def load(folder: str) -> Policy:
        return load_policy(
            folder,
            tokenizer,
            device=torch.device("cpu") if is_sharded else world.device,
            precision=config.runtime.precision,
            attn_implementation=config.model.attn_implementation,
            gradient_checkpointing=config.model.gradient_checkpointing,
            trust_remote_code=config.model.trust_remote_code,
        )

    def load_trained() -> Policy:
        if not config.uses_lora:
            return load(str(start.checkpoint or path))
        policy = load(path)
        _make_adapter(config, policy, path, start.checkpoint)
        if config.lora.base_precision == "bf16":
            store_frozen_in_bf16(policy)
        return policy

    def load_reference() -> Policy:
        # Without model.reference it is the model that training began with, also for a policy from
        # a checkpoint.
        reference = load(reference_path or path)
        reference.model.eval().requires_grad_(False)
        if not algorithm.ref_sync_steps:  # a reference that moves needs its fp32 weights
            store_frozen_in_bf16(reference)
        return reference

    def make(load: Callable[[], Policy]) -> tuple[Policy, CompletionScorer, nn.Module | None]:
        if is_sharded:
            return _load_sharded(config, world, tokenizer, load)
        policy = load()
        return policy, CompletionScorer(policy.model, config.rollout.temperature), None

    def check(policy: Policy, scorer: CompletionScorer) -> str | None:
        return compute_inside(
            scorer,
            lambda: check_model(
                policy,
                scorer,
                disable_dropout=config.model.disable_dropout,
                reach=config.data.max_prompt_length + config.rollout.max_completion_length,
            ),
        )

    ref_scorer = None
    with together():
        policy, scorer, sampling_model = make(load_trained)
        if not is_sharded:
            policy.model.eval()  # dropout would draw random numbers
            policy.unreached = freeze_unreached(policy.model, policy.score_one_token(scorer))
        if algorithm.beta > 0 and config.uses_lora and reference_path is None:
            ref_scorer = lora.AdapterReference(policy, scorer)
        elif algorithm.beta > 0:
            reference, ref_scorer, _ = make(load_reference)

    with world.fail_together():  # under FSDP each rank reads its shares of the states
        moving_reference = _moving_reference(config, ref_scorer, policy)
        optimizer, lr_schedule = _optimizer(config, policy, max_steps, start, moving_reference)

    with together():
        why_padded = check(policy, scorer)
        if isinstance(ref_scorer, CompletionScorer):
            check(reference, ref_scorer)
    policy.model.train()

    sampler = policy
    gathered = None
    if sampling_model is not None and config.rollout.engine != "vllm":
        sampling_model.set_attn_implementation(policy.model.config._attn_implementation)
        sampler = replace(policy, model=sampling_model)
        gathered = GatheredWeights(scorer, policy.model, sampling_model)
    return Models(
        policy,
        scorer,
        ref_scorer,
        optimizer,
        lr_schedule,
        why_padded,
        moving_reference,
        sampler,
        gathered,
    )


def _make_adapter(config: Config, policy: Policy, path: str, folder: Path | None) -> None:
    """Put the run's adapter, with the values of the start or of the checkpoint, into the model at
    ``path``.

    A frozen adapter, if the reference needs one, gets those of the start.
    """
    algorithm = config.algorithm
    settings = config.lora
    start = config.model.adapter
    base = os.path.abspath(path) if os.path.isdir(path) else path
    if start is None:
        options = {
            "r": settings.rank,
            "lora_alpha": settings.alpha or 2 * settings.rank,
            "lora_dropout": settings.dropout,
            "use_rslora": settings.rslora,
            "init_lora_weights": settings.init,
            "target_modules": settings.target_modules,
        }
        seed = derive_seed(config.seed, "lora")
        lora.add_adapter(policy, options, base=base, seed=seed)
    else:
        if folder is None:  # a continued run has compared these files with its checkpoint's
            check_base(start, path)
        lora.read_adapter(policy, start, base=base, dropout=settings.dropout)

    starts_as_reference = algorithm.beta > 0 and config.model.reference is None
    if starts_as_reference and (start is not None or algorithm.ref_sync_steps > 0):
        lora.add_reference_adapter(policy)
    if folder is not None:
        lora.read_values(policy, folder)


def _load_sharded(
    config: Config,
    world: World,
    tokenizer: Any,
    load: Callable[[], Policy],
) -> tuple[Policy, CompletionScorer, nn.Module]:
    """The policy that ``load`` returns on rank 0's CPU, sharded; its scorer, the root group; and
    empty modules.

    All ranks call it together, and errors of ``load`` are raised on all.
    """
    weights = {}
    empty = None
    with world.fail_together():
        if world.is_main:
            whole = load()
            weights = whole.model.state_dict(prefix="model.")
            empty = replace(whole.without_weights(), tokenizer=None)
    # The modules are sent, not built again: ties, buffers and adapters are those of the model that
    # rank 0 has loaded.
    policy = replace(world.from_main(empty), device=world.device, tokenizer=tokenizer)
    scorer = CompletionScorer(policy.model, config.rollout.temperature)
    sampling_model = copy.deepcopy(policy.model).requires_grad_(False)
    for module in sampling_model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(world.device)
    shard(
        scorer,
        decoder_layers(policy.model),
        weights,
        world,
        shard_size=config.runtime.shard_size,
        to_host=config.runtime.offload == "all",
    )
    return policy, scorer, sampling_model


def _moving_reference(config: Config, ref_scorer: Any, policy: Policy) -> dict[str, torch.Tensor]:
    """See :class:`Models`; ConfigError if it could not move towards the policy."""
    if ref_scorer is None or not config.algorithm.ref_sync_steps:
        return {}
    if isinstance(ref_scorer, lora.AdapterReference):
        return lora.adapter_parameters(policy.model, lora.REFERENCE_ADAPTER)
    shapes = [p.shape for p in ref_scorer.model.parameters()]
    if shapes != [p.shape for p in policy.model.parameters()]:
        raise ConfigError(
            f"{REFERENCE} has weights of other shapes than the policy, towards which algorithm.ref_sync_steps moves "
            "it: set ref_sync_steps=0"
        )
    return dict(ref_scorer.model.named_parameters())


def _optimizer(
    config: Config,
    policy: Policy,
    max_steps: int,
    start: StartPoint,
    moving_reference: dict[str, torch.Tensor],
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Optimizer and schedule as they are at the step where the run starts; a moving reference is
    restored too."""
    updates_per_step = config.algorithm.updates_per_step
    optimizer = make_optimizer(policy.model, config.optim)
    lr_schedule = make_lr_schedule(optimizer, config.optim, max_steps * updates_per_step)
    if start.checkpoint:
        changed = {key for key, _, _ in start.changes}
        if not changed.isdisjoint((REFERENCE, "model.adapter")):
            moving_reference = {}  # the saved one is the old reference, moved
        trained = checkpoint.TrainedTensors(policy, optimizer, moving_reference)
        checkpoint.restore(start.checkpoint, trained)
        move_schedule(lr_schedule, start.state["step"] * updates_per_step)
    return optimizer, lr_schedule

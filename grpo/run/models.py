"""Build the models of a run, the optimizer and the learning-rate schedule, in the state of the step
where the run starts."""

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
from grpo.distributed import World, run_in_forward_pass, shard
from grpo.model import (
    REFERENCE_KEY,
    Policy,
    check_base,
    decoder_layers,
    freeze_unused_by_text,
    load_policy,
    lora,
    store_frozen_in_bf16,
)
from grpo.rollout import check_model
from grpo.rollout.weights import GatheredWeights
from grpo.run.optimizer import make_lr_schedule, make_optimizer, move_schedule


@dataclass(frozen=True)
class Models:
    """The parts of a run that hold weights, or states of the optimizer."""

    policy: Policy
    scorer: CompletionScorer
    """Scorer of the policy. It is not yet wrapped in DDP. Under FSDP it is the root of the sharded
    modules."""
    ref_scorer: CompletionScorer | lora.AdapterReference | None
    optimizer: torch.optim.Optimizer
    lr_schedule: LRScheduler
    why_padded: str | None
    """Reason why each prompt is scored once per completion. None if each prompt is scored once per
    group."""
    moving_reference: dict[str, torch.Tensor]
    """Weights by name, for checkpoints, of a reference that changes during training
    (``ref_sync_steps``). Empty if there is no such reference."""
    sampler: Policy
    """Policy that the built-in engine samples from. Under FSDP its model is a second model, which
    is not sharded."""
    gathered: GatheredWeights | None
    """Fills the model of ``sampler`` with the weights under FSDP. None without FSDP, or if vLLM
    samples."""


def build_models(
    config: Config,
    world: World,
    path: str,
    tokenizer: Any,
    max_steps: int,
    start: StartPoint,
    needs_reference: bool,
    reference_path: str | None,
) -> Models:
    """Load or restore everything that holds weights. All ranks call it together.

    Args:
        path: the folder or Hub id that ``model.name_or_path`` stands for.
        needs_reference: True if the loss needs the log-probs of a reference.
        reference_path: the folder or Hub id that ``model.reference`` stands for. With None the
            reference is the model that training starts from.

    Raises:
        ValueError: on all ranks, if a model cannot be loaded, or if policy, reference and
            checkpoint do not fit each other.
    """
    is_sharded = config.runtime.parallel == "fsdp" and not world.is_single_process
    # Loading and passes under FSDP have collectives, which must not be inside fail_together().
    fail_together = contextlib.nullcontext if is_sharded else world.fail_together

    def load(folder: str) -> Policy:
        return load_policy(
            folder,
            tokenizer,
            # Under FSDP the GPU may have no room for a model that is not sharded.
            device=torch.device("cpu") if is_sharded else world.device,
            precision=config.runtime.precision,
            attn_implementation=config.model.attn_implementation,
            gradient_checkpointing=config.model.gradient_checkpointing,
            trust_remote_code=config.model.trust_remote_code,
        )

    def load_trained() -> Policy:
        if not config.uses_lora:
            return load(str(start.checkpoint or path))
        # A checkpoint of LoRA holds the adapter alone.
        policy = load(path)
        _make_adapter(config, policy, path, start.checkpoint, needs_reference)
        if config.lora.base_precision == "bf16":
            store_frozen_in_bf16(policy)
        return policy

    def load_reference() -> Policy:
        # The reference does not get the checkpoint's weights: without model.reference, the KL is
        # measured from the model that training began with.
        reference = load(reference_path or path)
        reference.model.eval().requires_grad_(False)
        # A reference that moves needs its fp32 weights: bf16 would round small steps away.
        if not config.algorithm.ref_sync_steps:
            store_frozen_in_bf16(reference)
        return reference

    def make(load: Callable[[], Policy]) -> tuple[Policy, CompletionScorer, nn.Module | None]:
        if is_sharded:
            return _load_sharded(config, world, tokenizer, load)
        policy = load()
        return policy, CompletionScorer(policy.model, config.rollout.temperature), None

    def check(policy: Policy, scorer: CompletionScorer) -> str | None:
        # The check runs inside of the root's forward pass, where FSDP has gathered the weights.
        return run_in_forward_pass(
            scorer,
            lambda: check_model(
                policy,
                scorer,
                disable_dropout=config.model.disable_dropout,
                max_row_tokens=config.data.max_prompt_length + config.rollout.max_completion_length,
            ),
        )

    # The policy, and the reference if the loss needs it.
    ref_scorer = None
    with fail_together():
        policy, scorer, sampling_model = make(load_trained)
        # DDP would wait for gradients of parameters that text does not reach; FSDP does not.
        if not is_sharded:
            policy.model.eval()  # dropout would draw random numbers
            policy.unused_by_text = freeze_unused_by_text(
                policy.model, policy.score_one_token(scorer)
            )
        if needs_reference:
            if config.uses_lora and reference_path is None:
                # The frozen base is in memory already: the reference costs an adapter, or nothing.
                ref_scorer = lora.AdapterReference(policy, scorer)
            else:
                reference, ref_scorer, _ = make(load_reference)

    with world.fail_together():  # under FSDP each rank reads its part of the states
        moving_reference = _moving_reference(config, ref_scorer, policy)
        optimizer, lr_schedule = _optimizer(config, policy, max_steps, start, moving_reference)

    # The fast ways of scoring and sampling that give right results with these models are switched
    # on.
    with fail_together():
        why_padded = check(policy, scorer)
        if isinstance(ref_scorer, CompletionScorer):
            check(reference, ref_scorer)
    policy.model.train()

    # Under FSDP no rank has all weights: a second model, filled for each rollout, samples.
    sampler = policy
    gathered = None
    if sampling_model is not None and config.rollout.engine != "vllm":
        # The check may have switched the policy to packed attention.
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


def _make_adapter(
    config: Config,
    policy: Policy,
    path: str,
    folder: Path | None,
    needs_reference: bool,
) -> None:
    """Put the run's LoRA adapter into the policy's model.

    If the reference needs a frozen adapter, the frozen adapter gets the values that training
    started from.

    Args:
        path: folder or Hub id of the base model.
        folder: checkpoint whose values the trained adapter gets. None for a new run.
    """
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
        if folder is None:  # a continued run has compared these files with the checkpoint
            check_base(start, path)
        lora.read_adapter(policy, start, base=base, dropout=settings.dropout)

    # A new adapter adds 0, so that the model without it can be the reference. A run that starts
    # from an adapter, or moves the reference, needs a frozen copy.
    starts_as_reference = needs_reference and config.model.reference is None
    if starts_as_reference and (start is not None or config.algorithm.ref_sync_steps > 0):
        lora.add_reference_adapter(policy)
    # Read after the frozen copy is made, which keeps the values that training started from.
    if folder is not None:
        lora.read_values(policy, folder)


def _load_sharded(
    config: Config,
    world: World,
    tokenizer: Any,
    load: Callable[[], Policy],
) -> tuple[Policy, CompletionScorer, nn.Module]:
    """Load a policy on rank 0's CPU by ``load``, and shard it over all ranks.

    All ranks call it together, and an error of ``load`` is raised on all ranks.

    Returns:
        Three values: the policy; the scorer, which was sharded as the root of all modules; a copy
        of the policy's model that has no weights.
    """
    weights = {}
    empty_policy = None
    with world.fail_together():
        if world.is_main:
            full_policy = load()
            weights = full_policy.model.state_dict(prefix="model.")
            empty_policy = replace(full_policy.without_weights(), tokenizer=None)
    # The modules are sent and not built again, so that all ranks have the tied parameters, buffers
    # and adapters of the model that rank 0 has loaded.
    empty_policy = world.broadcast_from_main(empty_policy)
    policy = replace(empty_policy, device=world.device, tokenizer=tokenizer)
    scorer = CompletionScorer(policy.model, config.rollout.temperature)
    # The model is copied before shard() replaces the parameters. shard() moves the buffers of the
    # policy alone.
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
    """Weights by name of a reference that moves towards the policy; empty if the reference is
    fixed.

    Raises:
        ConfigError: if the reference has weights of other shapes than the policy.
    """
    if ref_scorer is None or not config.algorithm.ref_sync_steps:
        return {}
    if isinstance(ref_scorer, lora.AdapterReference):
        return lora.adapter_parameters(policy.model, lora.REFERENCE_ADAPTER)
    shapes = [p.shape for p in ref_scorer.model.parameters()]
    if shapes != [p.shape for p in policy.model.parameters()]:
        raise ConfigError(
            f"{REFERENCE_KEY} has weights of other shapes than the policy, towards which "
            "algorithm.ref_sync_steps moves it: set ref_sync_steps=0"
        )
    return dict(ref_scorer.model.named_parameters())


def _optimizer(
    config: Config,
    policy: Policy,
    max_steps: int,
    start: StartPoint,
    moving_reference: dict[str, torch.Tensor],
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the optimizer and the learning-rate schedule of the step where the run starts.

    In a continued run, the optimizer and a moving reference are restored from the checkpoint.
    """
    updates_per_step = config.algorithm.updates_per_step
    optimizer = make_optimizer(policy.model, config.optim)
    lr_schedule = make_lr_schedule(optimizer, config.optim, max_steps * updates_per_step)
    if start.checkpoint:
        changed_keys = {key for key, _, _ in start.changes}
        if not changed_keys.isdisjoint((REFERENCE_KEY, "model.adapter")):
            moving_reference = {}  # the saved one is the old reference, moved
        trained = checkpoint.TrainedTensors(policy, optimizer, moving_reference)
        checkpoint.restore(start.checkpoint, trained)
        # The schedule is not in the checkpoint: it is a function of the number of updates.
        move_schedule(lr_schedule, start.state["step"] * updates_per_step)
    return optimizer, lr_schedule

"""The models of a run: policy, reference, scorers, optimizer and learning-rate schedule, as they are at the step where the run starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from grpo.config import Config, ConfigError
from grpo.distributed import World
from grpo.logprobs import CompletionScorer
from grpo.model import REFERENCE, Adapter, Policy, cast_frozen_to_bf16, load_policy, make_reference
from grpo.rollout import check_sampling
from grpo.rollout.gathered import GatheredWeights
from grpo.run import checkpoint
from grpo.run.adapters import AdapterReference, make_adapter
from grpo.run.optimizer import keep_states_on_host, make_lr_schedule, make_optimizer
from grpo.run.resume import StartPoint
from grpo.run.sharded.load import ShardedLoader
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
    moving_reference: nn.Module | Adapter | None
    """The reference model, or its adapter, if it changes during training (``ref_sync_steps``), so that checkpoints must hold it."""
    sampler: Policy
    """The policy that the built-in engine samples with: under FSDP its model is this rank's own."""
    gathered: GatheredWeights | None
    """Fills the sampler's model under FSDP; None: the sampler is the policy, or vLLM samples."""
    is_llama: bool | None
    """See :class:`grpo.rollout.BuiltinEngine`."""
    changed_rate: tuple[float, float] | None
    """The learning rates of the next update by the checkpoint's and by the new settings, where accepted changes make them differ."""


def build_models(
    config: Config,
    device: torch.device,
    path: str,
    tokenizer: Any,
    max_steps: int,
    start: StartPoint,
    reference_path: str | None = None,
) -> Models:
    """Load or restore everything that holds weights.

    Args:
        path: the folder or Hub id that ``model.name_or_path`` stands for.
        reference_path: the one that ``model.reference`` stands for; None: the reference is the model that training starts from.

    Raises:
        ValueError: if a model cannot be loaded, if policy and reference do not fit each other, or the checkpoint's optimizer state does not
            fit.
    """
    algorithm, temperature = config.algorithm, config.rollout.temperature
    options = config.model.model_dump(exclude={"name_or_path", "adapter", "reference"})
    options |= {"device": device, "precision": config.runtime.precision}
    ref_scorer = frozen_adapter = None
    if config.uses_lora:
        policy = load_policy(path, tokenizer, **options)
        frozen_adapter = make_adapter(config, policy, path, start.checkpoint)
    else:
        policy = load_policy(str(start.checkpoint or path), tokenizer, **options)
    if algorithm.beta > 0:
        # Without model.reference it is the model that training began with, also when the policy continues from a checkpoint.
        if reference_path is not None:
            anchor = load_policy(reference_path, tokenizer, **options, setting=REFERENCE).model
            _check_reference(reference_path, anchor, policy.model, moves=algorithm.ref_sync_steps > 0)
            ref_scorer = CompletionScorer(make_reference(anchor), temperature)
        elif policy.adapter is not None:
            ref_scorer = AdapterReference(policy, temperature, frozen_adapter)
        else:
            anchor = load_policy(path, tokenizer, **options).model if start.checkpoint else policy.model
            ref_scorer = CompletionScorer(make_reference(anchor), temperature)
    moving_reference = frozen_adapter or ref_scorer.model if ref_scorer and algorithm.ref_sync_steps else None
    trained = _trained(config, policy.model, max_steps, start, moving_reference, device)
    policy.model.train()
    scorer = CompletionScorer(policy.model, temperature)
    why_padded = enable_packing(config, scorer)
    check_sampling(policy)
    if ref_scorer is not None:
        if scorer.packed:
            ref_scorer.pack_groups()
        ref_scorer.plain_head  # noqa: B018  computed now, while its weights are fp32
        has_own_weights = ref_scorer.model is not policy.model
        if has_own_weights and moving_reference is None:  # a reference that moves needs its fp32 weights
            cast_frozen_to_bf16(ref_scorer.model, policy)
    sampling = dict(sampler=policy, gathered=None, is_llama=None)
    models = dict(policy=policy, scorer=scorer, ref_scorer=ref_scorer, moving_reference=moving_reference)
    return Models(**models, **trained, **sampling, why_padded=why_padded)


def build_sharded_models(
    config: Config,
    world: World,
    path: str,
    tokenizer: Any,
    max_steps: int,
    start: StartPoint,
    reference_path: str | None = None,
) -> Models:
    """As :func:`build_models`, divided over the ranks (``runtime.parallel=fsdp``). All ranks call it together."""
    algorithm, loader = config.algorithm, ShardedLoader(config, world, tokenizer)
    loaded = loader.policy(str(start.checkpoint or path), partial(enable_packing, config))
    policy, ref_scorer, moves = loaded.policy, None, algorithm.ref_sync_steps > 0
    if algorithm.beta > 0:
        setting = "model.name_or_path" if reference_path is None else REFERENCE
        ref_scorer = loader.reference(reference_path or path, setting, packed=loaded.scorer.packed, moves=moves)
        if reference_path is not None:
            _check_reference(reference_path, ref_scorer.model, policy.model, moves=moves)
    moving_reference = ref_scorer.model if ref_scorer and moves else None
    with world.fail_together():  # each rank reads its own shares of the states
        trained = _trained(config, policy.model, max_steps, start, moving_reference, world.device)
    sampling = dict(sampler=loaded.sampler, gathered=loaded.gathered, is_llama=loaded.is_llama)
    models = dict(policy=policy, scorer=loaded.scorer, ref_scorer=ref_scorer, moving_reference=moving_reference)
    return Models(**models, **trained, **sampling, why_padded=loaded.why_padded)


def _trained(
    config: Config,
    model: nn.Module,
    max_steps: int,
    start: StartPoint,
    moving_reference: nn.Module | Adapter | None,
    device: torch.device,
) -> dict[str, Any]:
    """Optimizer, schedule and :attr:`Models.changed_rate`, as they are at the step where the run starts; the reference is restored too."""
    algorithm, optim = config.algorithm, config.optim
    optimizer = make_optimizer(model, **optim.model_dump(include={"learning_rate", "betas", "weight_decay"}))
    schedule_options = optim.model_dump(include={"warmup_steps", "min_lr"})
    num_updates = max_steps * algorithm.updates_per_step
    lr_schedule = make_lr_schedule(optimizer, name=optim.lr_scheduler_type, num_updates=num_updates, **schedule_options)
    changed_rate = None
    if start.checkpoint:
        changed_rate = _restore(
            start, algorithm.updates_per_step, model, optimizer, lr_schedule, moving_reference, device
        )
    if config.runtime.offload == "optimizer":
        keep_states_on_host(optimizer)
    return dict(optimizer=optimizer, lr_schedule=lr_schedule, changed_rate=changed_rate)


def _check_reference(path: str, reference: nn.Module, model: nn.Module, *, moves: bool) -> None:
    """ValueError unless the reference knows every token id that the policy can sample and, if it moves, has the policy's weights by shape."""
    rows, needed = (m.get_input_embeddings().weight.shape[0] for m in (reference, model))
    if rows < needed:
        raise ConfigError(
            f"{REFERENCE}={path} has an embedding of {rows} rows, the model that is trained one of {needed}"
        )
    shapes, expected = ([parameter.shape for parameter in m.parameters()] for m in (reference, model))
    if moves and shapes != expected:
        raise ConfigError(
            f"algorithm.ref_sync_steps moves the reference towards the policy, and {REFERENCE}={path} has weights of other shapes: set "
            "ref_sync_steps=0, or take a reference of the policy's size"
        )


def _restore(
    start: StartPoint,
    updates_per_step: int,
    model: nn.Module,
    optimizer: Any,
    schedule: Any,
    reference: Any,
    device: torch.device,
) -> tuple[float, float] | None:
    """Restore optimizer, schedule and reference; where settings changed, Adam's averages alone, with the new settings.

    Returns :attr:`Models.changed_rate`.
    """
    folder, is_same = start.checkpoint, not start.changes
    settings = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    # The saved one is the old reference, moved.
    if any(key in (REFERENCE, "model.adapter") for key, _, _ in start.changes):
        reference = None
    restored = dict(model=model, optimizer=optimizer, schedule=schedule if is_same else None, reference=reference)
    try:
        checkpoint.restore(folder, device=device, **restored)
    except (UnpicklingError, RuntimeError, ValueError, KeyError) as error:  # a checkpoint that another program made
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{folder} cannot be continued from ({reason})") from None
    if is_same:
        return None
    old_rate = optimizer.param_groups[0]["lr"]
    done = start.state["step"] * updates_per_step
    schedule.last_epoch, schedule._step_count = done, done + 1
    schedule._last_lr = [b * factor(done) for b, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, own, lr in zip(optimizer.param_groups, settings, schedule._last_lr, strict=True):
        group.update(own | {"lr": lr})
    return None if schedule._last_lr[0] == old_rate else (old_rate, schedule._last_lr[0])


def enable_packing(config: Config, scorer: CompletionScorer) -> str | None:
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

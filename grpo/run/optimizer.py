"""AdamW, its learning-rate schedule, and one update from the accumulated gradients."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from grpo.distributed import whole
from grpo.model import sync_reference
from grpo.model.lora import copy_to_reference_adapter
from grpo.run.records import Learner
from grpo.telemetry.accumulator import Accumulator

MAX_SKIPPED_IN_A_ROW = 10


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: norms and biases are not pulled towards 0."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    # On CUDA one fused kernel updates many parameters, and needs no memory of its own.
    fused = all(p.is_cuda and p.dtype == torch.float32 for p in parameters) or None
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)


def keep_states_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Keep Adam's averages in host memory between updates (``runtime.offload=optimizer``)."""

    def move(*, to_host: bool) -> None:
        for parameter, state in optimizer.state.items():
            device = "cpu" if to_host else parameter.device
            for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
                state[name] = state[name].to(device)

    move(to_host=True)
    optimizer.register_step_pre_hook(lambda *_: move(to_host=False))
    optimizer.register_step_post_hook(lambda *_: move(to_host=True))


def make_lr_schedule(
    optimizer: torch.optim.Optimizer,
    *,
    name: str,
    num_updates: int,
    warmup_steps: float,
    min_lr: float | None,
) -> LambdaLR:
    """A schedule of ``num_updates`` optimizer updates, by ``transformers.get_scheduler``.

    Args:
        warmup_steps: optimizer updates; below 1 a fraction of ``num_updates``, rounded up as
            transformers does.
        min_lr: floor of a cosine schedule. Default: 0.
    """
    warmup = int(warmup_steps)
    if warmup_steps < 1:
        warmup = math.ceil(warmup_steps * num_updates)
    options: dict[str, Any] = {}
    # transformers ignores the warm-up of "constant" without a warning.
    if name == "constant" and warmup:
        name = "constant_with_warmup"
    if min_lr is not None:
        name = "cosine_with_min_lr"
        options["min_lr"] = min_lr
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=num_updates,
        scheduler_specific_kwargs=options,
    )


def move_schedule(schedule: LambdaLR, num_updates: int) -> None:
    """Set the schedule, and the learning rates, to where they are after so many updates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has made no update yet
        for _ in range(num_updates):
            schedule.step()


def apply_update(learner: Learner, metrics: Accumulator) -> None:
    """Clip the gradient, vote on whether it is finite, step the optimizer and the schedule.

    If the gradient is not finite on any rank, all ranks skip the update: no weight changes.

    Raises:
        ValueError: on all ranks, after ``MAX_SKIPPED_IN_A_ROW`` such gradients in a row.
    """
    world = learner.world
    progress = learner.progress
    max_norm = learner.config.optim.max_grad_norm
    parameters = learner.policy.model.parameters()
    grad_norm = whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    is_finite = world.all_true(bool(torch.isfinite(grad_norm)))
    skipped_in_a_row = 0
    if not is_finite:
        skipped_in_a_row = progress.skipped_in_a_row + 1
        learner.reporter.print(
            "warning: a gradient is not finite: this update is skipped, and the weights do not change"
        )
    if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise ValueError(
            f"{skipped_in_a_row} updates in a row had a gradient that is not finite: lower optim.learning_rate"
        )

    metrics.add("grad_norm", grad_norm if is_finite else 0.0, count=float(is_finite))
    metrics.add("learning_rate", learner.optimizer.param_groups[0]["lr"])
    # All ranks skip together, and totals are summed over ranks: the main rank counts for all.
    metrics.total("skipped_updates", float(not is_finite and world.is_main))

    # Only now: after the error above the step before can still be saved, with its own counter.
    progress.mid_update = True
    progress.skipped_in_a_row = skipped_in_a_row
    if is_finite:
        learner.optimizer.step()
    learner.lr_schedule.step()  # also after a skipped update: the rate is a function of the step
    # Under DDP gradients are views of its buckets: set to None, they would be allocated twice.
    are_views = not world.is_alone and not learner.is_sharded
    learner.optimizer.zero_grad(set_to_none=not are_views)


def sync_reference_if_due(learner: Learner, num_steps: int) -> None:
    """After every ``ref_sync_steps`` steps, move the reference towards the policy."""
    algorithm = learner.config.algorithm
    if learner.ref_scorer is None or not algorithm.ref_sync_steps:
        return
    if num_steps % algorithm.ref_sync_steps != 0:
        return
    model = learner.policy.model
    if learner.ref_scorer.model is model:  # LoRA: the reference is an adapter of the same model
        copy_to_reference_adapter(model)
    else:
        sync_reference(learner.ref_scorer.model, model, algorithm.ref_sync_alpha)

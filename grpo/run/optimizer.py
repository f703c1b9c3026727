"""AdamW, its learning-rate schedule, and one update from the accumulated gradients."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from grpo.distributed import is_sharded, whole
from grpo.run.state import Run
from grpo.telemetry.accumulator import Accumulator

MAX_SKIPPED_IN_A_ROW = 10


def make_optimizer(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: norms and biases are not pulled towards 0.

    ``adamw``: on CUDA, one fused kernel updates many parameters and needs no memory of its own; on CPU PyTorch's loop
    over parameters stays.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = all(p.is_cuda and p.dtype == torch.float32 for p in parameters) or None
    matrices, others = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)


def keep_states_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Keep Adam's averages in host memory between updates (``runtime.offload=optimizer``)."""

    def move(*, to_host: bool) -> None:
        for parameter, state in optimizer.state.items():
            for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
                state[name] = state[name].to("cpu" if to_host else parameter.device)

    move(to_host=True)
    optimizer.register_step_pre_hook(lambda *_: move(to_host=False))
    optimizer.register_step_post_hook(lambda *_: move(to_host=True))


def make_lr_schedule(
    optimizer: torch.optim.Optimizer, *, name: str, num_updates: int, warmup_steps: float, min_lr: float | None
) -> LambdaLR:
    """A learning-rate schedule of ``num_updates`` optimizer updates, from ``transformers.get_scheduler``.

    Args:
        warmup_steps: optimizer updates; below 1 a fraction of ``num_updates``, rounded up as transformers does.
        min_lr: floor of a cosine schedule; None: 0.
    """
    warmup = math.ceil(warmup_steps * num_updates) if warmup_steps < 1 else int(warmup_steps)
    extra: dict[str, Any] = {}
    if name == "constant" and warmup:  # transformers ignores the warm-up of "constant" without a warning
        name = "constant_with_warmup"
    if min_lr is not None:
        name, extra = "cosine_with_min_lr", {"scheduler_specific_kwargs": {"min_lr": min_lr}}
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_updates, **extra)


def move_schedule(schedule: LambdaLR, num_updates: int) -> None:
    """Set the schedule, and the learning rates of its optimizer, to where they are after so many updates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has made no update yet
        for _ in range(num_updates):
            schedule.step()


def apply_update(run: Run, metrics: Accumulator) -> None:
    """Clip the gradient, vote on whether it is finite, step the optimizer and the schedule.

    If the gradient is not finite on any rank, all ranks skip the update, and the weights do not change.

    Raises:
        ValueError: on all ranks, after ``MAX_SKIPPED_IN_A_ROW`` such gradients in a row.
    """
    progress = run.progress
    grad_norm = whole(torch.nn.utils.clip_grad_norm_(run.policy.model.parameters(), run.config.optim.max_grad_norm))
    is_finite = run.world.all_true(bool(torch.isfinite(grad_norm)))
    skipped = 0 if is_finite else progress.skipped_in_a_row + 1
    if not is_finite:
        run.reporter.print("warning: a gradient is not finite: this update is skipped, and the weights do not change")
        if skipped >= MAX_SKIPPED_IN_A_ROW:
            raise ValueError(
                f"{skipped} update(s) in a row had a gradient that is not finite: lower optim.learning_rate"
            )
    metrics.add("grad_norm", grad_norm if is_finite else 0.0, count=float(is_finite))
    # All ranks skip together, and totals are summed over ranks: only the main rank counts the update.
    metrics.total("skipped_updates", float(not is_finite and run.world.is_main))
    metrics.add("learning_rate", run.optimizer.param_groups[0]["lr"])
    progress.mid_update = True
    # Not before the error above: the checkpoint of the step before must count the updates of complete steps only.
    progress.skipped_in_a_row = skipped
    if is_finite:
        run.optimizer.step()
    run.lr_schedule.step()  # also after a skipped update: the learning rate is a function of the step
    # Under DDP gradients are views of its buckets: set to None, they would be allocated a second time.
    run.optimizer.zero_grad(set_to_none=run.world.is_alone or is_sharded(run.scorer))

"""The optimizer, its schedule, and one update from the gradient that the backward passes left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import get_scheduler

if TYPE_CHECKING:
    from grpo.run.state import Run
    from grpo.telemetry.accumulator import Accumulator

MAX_SKIPPED_IN_A_ROW = 10


def make_optimizer(model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float):
    """AdamW with weight decay on matrices only: norms and biases are not pulled to 0."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas)


def make_schedule(optimizer, *, name: str, num_updates: int, warmup_steps: float, min_lr: float | None):
    """A learning-rate schedule of ``num_updates`` optimizer updates, from ``transformers.get_scheduler``.

    Raises:
        ValueError: on a name that transformers does not know.
    """
    warmup = round(warmup_steps * num_updates) if warmup_steps < 1 else int(warmup_steps)
    extra: dict[str, Any] = {}
    if name == "constant" and warmup:  # transformers would ignore the warm-up without a word
        name = "constant_with_warmup"
    if min_lr is not None:
        name, extra = "cosine_with_min_lr", {"scheduler_specific_kwargs": {"min_lr": min_lr}}
    try:
        return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_updates, **extra)
    except ValueError as error:
        raise ValueError(f"optim.lr_scheduler_type={name}: {str(error).splitlines()[0]}") from None


def follow_settings(optimizer: Any, schedule: Any, settings: list[dict[str, Any]], *, num_updates: int) -> None:
    """After moments were restored under other settings: take those of the configuration, ``num_updates`` updates into its schedule.

    Args:
        settings: of each group as :func:`make_schedule` left them, before ``load_state_dict`` put the saved ones in their place.
        schedule: a fresh ``LambdaLR``.
    """
    schedule.last_epoch, schedule._step_count = num_updates, num_updates + 1
    schedule._last_lr = [
        base * factor(num_updates) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, own, lr in zip(optimizer.param_groups, settings, schedule._last_lr, strict=True):
        group.update(own | {"lr": lr})


def apply_update(run: Run, metrics: Accumulator) -> None:
    """Clip the gradient, vote on it, step. One that is not finite on any rank is left out on all; the weights are untouched then.

    Raises:
        ValueError: on all ranks, after ``MAX_SKIPPED_IN_A_ROW`` such gradients in a row (the first, with ``optim.on_nonfinite=stop``).
    """
    grad_norm = torch.nn.utils.clip_grad_norm_(run.policy.model.parameters(), run.config.optim.max_grad_norm)
    finite = run.world.all_true(bool(torch.isfinite(grad_norm)))
    run.skipped_in_a_row = 0 if finite else run.skipped_in_a_row + 1
    if not finite:
        run.reporter.print("warning: a gradient is not finite; this update is left out and the weights are untouched")
        if run.config.optim.on_nonfinite == "stop" or run.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise ValueError(
                f"{run.skipped_in_a_row} update(s) in a row had a gradient that is not finite: lower optim.learning_rate"
            )
    metrics.add("grad_norm", grad_norm if finite else 0.0, float(finite))
    metrics.total("skipped_updates", (not finite) / run.world.size)  # summed over ranks, which all skip together
    metrics.add("learning_rate", run.optimizer.param_groups[0]["lr"])
    run.saver.whole_step = None  # from here to the end of the step, weights and schedule are between two steps
    if finite:
        run.optimizer.step()
    run.schedule.step()  # also after a skipped update: the learning rate is a function of the step
    run.optimizer.zero_grad(set_to_none=True)

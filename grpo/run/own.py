"""A user's own loss and advantages: ``algorithm.objective`` and ``algorithm.advantages`` that name a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.algorithm.advantages import OwnAdvantages, call_own_advantages
from grpo.algorithm.loss import OwnObjective, policy_loss
from grpo.config import Config
from grpo.config.algorithm import is_own
from grpo.rewards.functions import load_object, raised, source_files


@dataclass(frozen=True)
class OwnFunctions:
    """The functions; None where a built-in one is configured."""

    objective: OwnObjective | None = None
    advantages: OwnAdvantages | None = None
    source_files: dict[str, str] = field(default_factory=dict)
    """Name for messages -> path of the files that define them."""


def load_own_functions(config: Config) -> OwnFunctions:
    """Load the functions, and call each once on a small example; ValueError in one line on a mistake."""
    algorithm, files = config.algorithm, {}
    objective = algorithm.objective if is_own(algorithm.objective) else None
    return OwnFunctions(
        _load("algorithm.objective", objective, _try_objective, files),
        _load("algorithm.advantages", algorithm.advantages, partial(_try_advantages, config), files),
        files,
    )


def _load(key: str, name: str | None, trial: Callable[[Any], None], files: dict[str, str]) -> Any:
    if name is None:
        return None
    function = load_object(name, key, "")
    if not callable(function):
        location, _, last = name.rpartition(":")
        raise ValueError(f"{key}={name}: {location} has no function {last!r}")
    try:
        trial(function)
    except Exception as error:  # the user's function may raise anything
        path = getattr(getattr(function, "__code__", None), "co_filename", "")
        raise ValueError(f"{key}={name}{raised(error, path)}") from error
    files |= source_files(name, function)
    return function


def _try_objective(function: OwnObjective) -> None:
    """Loss and gradient of rows of 2, 1 and 0 tokens, one of them with a ratio of 1.

    They must be the same for each row alone, and with more padding: a cut into micro-batches changes both.
    """
    logprobs_BT = torch.tensor(
        [
            [-1.0, -2.0],
            [-0.5, 0.0],
            [0.0, 0.0],
        ],
        requires_grad=True,
    )
    mask_BT = torch.tensor(
        [
            [True, True],
            [True, False],
            [False, False],
        ]
    )
    change_B1 = torch.tensor([[0.1], [0.0], [0.0]])
    old_logprobs_BT = logprobs_BT.detach() - change_B1
    advantages_B = torch.tensor([1.0, -1.0, 2.0])

    def loss_of(rows: slice, num_padding: int = 0) -> Tensor:
        def cut(x_BT: Tensor) -> Tensor:
            return pad(x_BT[rows], (0, num_padding))

        loss_sum, _ = policy_loss(
            cut(logprobs_BT),
            cut(old_logprobs_BT),
            advantages_B[rows],
            cut(mask_BT),
            objective=function,
        )
        return loss_sum

    loss = loss_of(slice(3))
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    if not gradient_BT.any():
        needs = "it must be computed from logprobs_BT or ratio_BT"
        raise ValueError(f"the loss has no gradient: {needs}")
    if not (loss.isfinite() and gradient_BT.isfinite().all()):
        values = f"loss {loss.item()} or gradient {gradient_BT.tolist()}"
        raise ValueError(f"{values} is not finite")

    row_by_row = [loss_of(slice(b, b + 1)) for b in range(3)]
    other_losses = {
        "the other rows": sum(row_by_row),
        "the number of padding columns": loss_of(slice(3), num_padding=2),
    }
    for cause, other_loss in other_losses.items():
        (other_BT,) = torch.autograd.grad(other_loss, logprobs_BT)
        is_same = torch.isclose(loss, other_loss)
        if not is_same or not torch.allclose(gradient_BT, other_BT, atol=1e-6):
            effect = "and so the update on how the batch is cut"
            raise ValueError(f"the loss of a row depends on {cause}, {effect}")


def _try_advantages(config: Config, function: OwnAdvantages) -> None:
    """Advantages of two problems, with different rewards and with one that is not scored."""
    G, F = config.rollout.num_generations, max(len(config.reward.functions), 1)
    rewards_PG = torch.arange(2.0 * G).view(2, G)
    rewards_PG[1, 0] = torch.nan
    call_own_advantages(function, rewards_PG, rewards_PG[..., None].expand(2, G, F))

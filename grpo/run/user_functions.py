"""A user's own loss and advantages.

They are functions that ``algorithm.objective`` and ``algorithm.advantages`` name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.algorithm.advantages import OwnAdvantages, call_user_advantages
from grpo.algorithm.loss import OwnObjective, policy_loss
from grpo.config import Config
from grpo.config.algorithm import is_own
from grpo.rewards.functions import load_object, raised, source_files


@dataclass(frozen=True)
class UserFunctions:
    """The functions of the user; None where a built-in one is configured."""

    objective: OwnObjective | None
    advantages: OwnAdvantages | None
    source_files: dict[str, str]
    """Name for messages -> path of the files that define them."""


def load_user_functions(config: Config) -> UserFunctions:
    """Load the functions, and call each once on a small example.

    Raises:
        ValueError: on a mistake, in one line.
    """
    files = {}
    objective = None
    if is_own(config.algorithm.objective):
        objective = _load(config, "objective", _try_objective, files)
    advantages = None
    if config.algorithm.advantages is not None:
        advantages = _load(config, "advantages", _try_advantages, files)
    return UserFunctions(objective, advantages, files)


def _load(config: Config, key: str, trial: Callable[..., None], files: dict[str, str]) -> Any:
    name = getattr(config.algorithm, key)
    place = f"algorithm.{key}={name}"
    function = load_object(name, f"algorithm.{key}", "")
    if not callable(function):
        raise ValueError(f"{place}: there is no function of that name")
    found = source_files(name, function)
    defining = next(reversed(found.values()), "")
    try:
        trial(function, config)
    except Exception as error:  # the user's function may raise anything
        raise ValueError(f"{place}{raised(error, defining)}") from error
    files |= found
    return function


def _try_objective(function: OwnObjective, config: Config) -> None:
    """Check loss and gradient of rows of 2, 1 and 0 tokens, with ratios above, below and at 1.

    They must be the same for each row alone and with more padding, as in other micro-batches.
    """
    logprobs_BT = torch.tensor(
        [
            [-1.1, -2.2],
            [-1.0, 0.0],
            [0.0, 0.0],
        ],
        requires_grad=True,
    )
    mask_BT = logprobs_BT < 0
    change_BT = torch.zeros(3, 2)
    change_BT[0] = torch.tensor([0.1, -0.2])
    old_logprobs_BT = logprobs_BT.detach() - change_BT
    advantages_B = torch.tensor([1.0, -1.0, 2.0])

    def loss_of(rows: slice, num_padding: int = 0) -> Tensor:
        padding = (0, num_padding)
        loss_sum, _ = policy_loss(
            pad(logprobs_BT[rows], padding),
            pad(old_logprobs_BT[rows], padding),
            advantages_B[rows],
            pad(mask_BT[rows], padding),
            objective=function,
        )
        return loss_sum

    loss = loss_of(slice(3))
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    if not gradient_BT.any():
        raise ValueError("the loss has no gradient: compute it from logprobs_BT or ratio_BT")
    if not (loss.isfinite() and gradient_BT.isfinite().all()):
        values = f"loss {loss.item()} or gradient {gradient_BT.tolist()}"
        raise ValueError(f"{values} is not finite")

    row_by_row = [loss_of(slice(b, b + 1)) for b in range(3)]
    for other_loss in (sum(row_by_row), loss_of(slice(3), num_padding=2)):
        (other_BT,) = torch.autograd.grad(other_loss, logprobs_BT)
        is_same = torch.isclose(loss, other_loss)
        if not is_same or not torch.allclose(gradient_BT, other_BT, atol=1e-6):
            raise ValueError(
                "the loss of a row depends on the other rows or on the number of padding columns, "
                "and so the update on how the batch is cut"
            )


def _try_advantages(function: OwnAdvantages, config: Config) -> None:
    """Compute advantages of two problems, with different rewards and with one that is missing."""
    G = config.rollout.num_generations
    F = len(config.reward.functions) or 1  # with none, an environment gives the reward
    rewards_PG = torch.arange(2.0 * G).view(2, G)
    rewards_PG[1, 0] = torch.nan
    values_PGF = rewards_PG[..., None].expand(2, G, F)
    call_user_advantages(function, rewards_PG, values_PGF)

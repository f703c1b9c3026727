"""A user's own loss and advantages.

They are functions that ``algorithm.objective`` and ``algorithm.advantages`` name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """Check the gradient of the loss of rows of 2, 1 and 0 tokens.

    It must be the same for each row alone and with more padding, as in other micro-batches.
    """
    logprobs_BT = torch.tensor(
        [
            [-1.1, -2.2, 0.0, 0.0],
            [-1.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0],
        ],
        requires_grad=True,
    )
    mask_BT = logprobs_BT < 0
    # So the second row has a ratio of 1, as in a first update, and the first row has not.
    old_logprobs_BT = logprobs_BT.detach().round()
    advantages_B = torch.tensor([1.0, -1.0, 2.0])

    def gradient_of(rows: slice, T: int) -> Tensor:
        loss_sum, _ = policy_loss(
            logprobs_BT[rows, :T],
            old_logprobs_BT[rows, :T],
            advantages_B[rows],
            mask_BT[rows, :T],
            objective=function,
        )
        return torch.autograd.grad(loss_sum, logprobs_BT)[0]

    gradient_BT = gradient_of(slice(3), 2)
    if not gradient_BT.any():
        raise ValueError("the loss has no gradient: compute it from logprobs_BT or ratio_BT")
    if not gradient_BT.isfinite().all():
        raise ValueError(f"the gradient of the loss is not finite: {gradient_BT.tolist()}")

    row_by_row_BT = sum(gradient_of(slice(b, b + 1), 4) for b in range(3))
    if not torch.allclose(gradient_BT, row_by_row_BT, atol=1e-6):
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

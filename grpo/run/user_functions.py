"""A user's own loss and advantages.

They are functions that ``algorithm.objective`` and ``algorithm.advantages`` name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.algorithm.advantages import UserAdvantages
from grpo.algorithm.loss import UserObjective, policy_loss
from grpo.config import Config
from grpo.config.algorithm import is_user_function
from grpo.rewards.functions import load_object, raised, source_files


@dataclass(frozen=True)
class UserFunctions:
    """The functions of the user; None where a built-in one is configured."""

    objective: UserObjective | None
    advantages: UserAdvantages | None
    source_files: dict[str, str]
    """Name for messages -> path of the files that define them."""


def load_user_functions(config: Config) -> UserFunctions:
    """Load the functions, and call the loss on a small example.

    Raises:
        ValueError: on a mistake, in one line.
    """
    algorithm = config.algorithm
    files = {}
    objective = None
    if is_user_function(algorithm.objective):
        objective = _load("algorithm.objective", algorithm.objective, files)
        try:
            _try_objective(objective)
        except Exception as error:  # the user's function may raise anything
            file = next(reversed(files.values()), "")
            raise ValueError(
                f"algorithm.objective={algorithm.objective}{raised(error, file)}"
            ) from error
    advantages = None
    if algorithm.advantages is not None:
        advantages = _load("algorithm.advantages", algorithm.advantages, files)
    return UserFunctions(objective, advantages, files)


def _load(key: str, name: str, files: dict[str, str]) -> Any:
    """The function of that name; adds the files that define it."""
    function = load_object(name, key, "")
    if not callable(function):
        raise ValueError(f"{key}={name}: there is no function of that name")
    files |= source_files(name, function)
    return function


def _try_objective(function: UserObjective) -> None:
    """Check loss and gradient of rows of 2, 1 and 0 tokens, with ratios above, below and at 1.

    They must be the same for each row alone and with more padding, as in other micro-batches.
    """
    logprobs_BT = torch.tensor([[-1.1, -2.2], [-1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    old_logprobs_BT = torch.tensor([[-1.2, -2.0], [-1.0, 0.0], [0.0, 0.0]])
    advantages_B = torch.tensor([1.0, -1.0, 2.0])

    def loss_of(rows: slice, num_padding: int = 0) -> Tensor:
        padding = (0, num_padding)
        loss_sum, _ = policy_loss(
            pad(logprobs_BT[rows], padding),
            pad(old_logprobs_BT[rows], padding),
            advantages_B[rows],
            pad(old_logprobs_BT[rows] < 0, padding),
            objective=function,
        )
        return loss_sum

    loss = loss_of(slice(3))
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    row_by_row = loss_of(slice(0, 1)) + loss_of(slice(1, 2)) + loss_of(slice(2, 3))
    for other_loss in (row_by_row, loss_of(slice(3), num_padding=2)):
        (other_BT,) = torch.autograd.grad(other_loss, logprobs_BT)
        is_same = torch.isclose(loss, other_loss)
        if not is_same or not torch.allclose(gradient_BT, other_BT, atol=1e-6):
            raise ValueError(
                f"the loss ({loss:g}) is not finite, or that of a row depends on the other rows or on "
                "the number of padding columns, and so the update on how the batch is cut"
            )

"""Functions of the user for the loss (``algorithm.objective``) and for advantages
(``algorithm.advantages``)."""

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
from grpo.rewards.functions import describe_error, load_object, source_files


@dataclass(frozen=True)
class UserFunctions:
    """The user's functions for loss and advantages. A function is None if the configuration names a
    built-in one."""

    objective: UserObjective | None
    advantages: UserAdvantages | None
    source_files: dict[str, str]
    """Files that define the functions: name of a file for messages -> path of the file."""


def load_user_functions(config: Config) -> UserFunctions:
    """Load the user's functions, and try the loss on a small example.

    Raises:
        ValueError: if the user made a mistake, with a message of one line.
    """
    algorithm = config.algorithm
    files = {}
    objective = None
    if is_user_function(algorithm.objective):
        objective = _load("algorithm.objective", algorithm.objective, files)
        try:
            _try_objective(objective)
        except Exception as error:  # the user's function may raise anything
            # The last file defines the function: the message names the line there.
            file = next(reversed(files.values()), "")
            raise ValueError(
                f"algorithm.objective={algorithm.objective}{describe_error(error, file)}"
            ) from error

    # Advantages are not tried here: their values are checked in each step.
    advantages = None
    if algorithm.advantages is not None:
        advantages = _load("algorithm.advantages", algorithm.advantages, files)
    return UserFunctions(objective, advantages, files)


def _load(key: str, name: str, files: dict[str, str]) -> Any:
    """Load the function that a key names, and add its source files to ``files``."""
    function = load_object(name, key, "")
    if not callable(function):
        raise ValueError(f"{key}={name}: there is no function of that name")
    files |= source_files(name, function)
    return function


def _try_objective(function: UserObjective) -> None:
    """Check the loss and its gradient on rows of 2, 1 and 0 tokens, with ratios above, below and at
    1.

    In other micro-batches a row has other neighbours and more padding. Loss and gradient must not
    depend on this.

    Raises:
        ValueError: if loss or gradient depend on other rows or on padding, or are not finite.
    """
    logprobs_BT = torch.tensor([[-1.1, -2.2], [-1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    old_logprobs_BT = torch.tensor([[-1.2, -2.0], [-1.0, 0.0], [0.0, 0.0]])
    advantages_B = torch.tensor([1.0, -1.0, 2.0])

    mask_BT = old_logprobs_BT < 0

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
    row_by_row = sum(loss_of(slice(b, b + 1)) for b in range(3))
    with_padding = loss_of(slice(3), num_padding=2)
    for other_loss in (row_by_row, with_padding):
        (other_gradient_BT,) = torch.autograd.grad(other_loss, logprobs_BT)
        # NaN is close to nothing, so a loss that is not finite fails here too.
        is_same_loss = torch.isclose(loss, other_loss)
        if not is_same_loss or not torch.allclose(gradient_BT, other_gradient_BT, atol=1e-6):
            raise ValueError(
                f"the loss ({loss:g}) is not finite, or that of a row depends on the other rows "
                "or on the number of padding columns, and so the update on how the batch is cut"
            )

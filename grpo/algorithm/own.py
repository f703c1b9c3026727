"""Call a user's function for the loss or the advantages: it gets the arguments that it names, and
may return metrics."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

PREFIX = "own/"
"""Begins the names of metrics that a user's loss or advantages return."""


def named_arguments(function: Callable) -> set[str]:
    """Return the names of the arguments of a function."""
    return set(inspect.signature(function).parameters)


def call_own(
    function: Callable,
    in_order: dict[str, Any],
    by_name: dict[str, Any],
) -> tuple[Any, Mapping[str, Any]]:
    """Call a user's function with copies of the arguments that it names.

    A function with names of its own gets the arguments of ``in_order`` by position. It may not have
    a name of another argument in the place of one of them.

    Args:
        in_order: arguments by name, in the order in which they are passed by position.
        by_name: further arguments, which are passed by name alone.

    Returns:
        The value that the function returned, and its metrics: ``{}`` if it returned no tuple
        ``(value, metrics)``.

    Raises:
        ValueError: if the function names an argument that does not exist. The function's own
            parameters stand after ``*``.
    """
    # The function may change its arguments. The metrics report the originals.
    known = by_name | in_order
    for name, value in known.items():
        if isinstance(value, Tensor):
            known[name] = value.clone()

    parameters = inspect.signature(function).parameters
    names = list(parameters)
    # An argument in the place of another, also without its shape (`ratio`), would get its tensor.
    all_known = f" {'_ '.join(known)}_"
    # A parameter after * takes nothing by position.
    is_in_place = all(
        parameters[name].kind != inspect.Parameter.KEYWORD_ONLY
        and (f"{place}_".startswith(f"{name}_") or f" {name}_" not in all_known)
        for name, place in zip(names, in_order, strict=False)
    )
    positional = []
    if names[0] not in known and is_in_place:
        positional = [known[name] for name in in_order]
    keywords = {}
    for name in names[len(positional) :]:
        if name in known:
            keywords[name] = known[name]
        # A misspelt name with a default would switch a part of the function off without a word.
        # Only the trainer's tensors have their shape in their name, and none has lost it.
        elif (
            parameters[name].kind != inspect.Parameter.KEYWORD_ONLY
            or re.search("_(B|BT|PG|PGF)$", name)
            or re.search(f" {name}_[A-Z]", all_known)
        ):
            raise ValueError(
                f"there is no argument {name!r}: a function may ask for {', '.join(known)}; "
                "parameters of its own stand after *, and do not end in a shape such as _BT, nor "
                "have the name of an argument without its shape"
            )
    returned = function(*positional, **keywords)
    match returned:
        case (value, Mapping() as metrics):
            return value, metrics
        case tuple():
            raise ValueError(
                "a tuple must be (tensor, {name: value}), not one of "
                f"{', '.join(type(part).__name__ for part in returned)}"
            )
    return returned, {}


def own_metrics(
    metrics: Mapping[str, Any],
    mask: Tensor,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the metrics of a user's function as name -> (sum, count).

    A value is a number or a tensor, of which the mean is reported: over the tokens of the mask if
    it has the shape of the mask, else over all its numbers. NaN is left out. So is a micro-batch
    without a token in the mask: with FSDP a rank may repeat a row without effect.

    Args:
        mask: ``[B, T]`` True at the tokens that count. For advantages: ``[P, G]``, all True.
    """
    pairs = {}
    for name, value in metrics.items():
        try:
            values = torch.as_tensor(value).detach().float()
        except Exception as error:  # the user's function may return anything
            raise ValueError(f"the metric {name!r} is {value!r:.80}, no number") from error
        if values.shape == mask.shape:
            values = values[mask]
        numbers = values[~values.isnan()]
        if not mask.any():
            numbers = numbers[:0]
        pairs[f"{PREFIX}{str(name).removeprefix(PREFIX)}"] = (
            numbers.sum(),
            torch.tensor(len(numbers)),
        )
    return pairs

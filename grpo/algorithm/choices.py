"""The named choices of an algorithm, for the configuration, the loss and the advantages. Imports no
torch."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

Objective = Literal["clip", "cispo", "sapo", "dppo_tv", "reinforce"]
Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "mean", "none"]
MultiObjectiveAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
Aggregation = Literal["response_mean", "token_mean", "constant"]
ImportanceLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
SamplerCorrection = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_mask",
]


def check_choice(name: str, value: str, choices: Any) -> None:
    """ValueError if the argument called ``name`` is none of ``choices``, one of the ``Literal``
    types above."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(allowed)}")


def check_returned(name: str, value: Any, shape: Sequence[int]) -> None:
    """ValueError if a function of the user, called ``name``, returned anything but a tensor of this
    shape."""
    got = tuple(value.shape) if hasattr(value, "detach") else type(value).__name__
    if got != tuple(shape):
        raise ValueError(f"{name} must return a tensor of shape {tuple(shape)}, got {got}")


def equal_rewards_have_gradient(baseline: Baseline, scale: Scale) -> bool:
    """True if advantages are the rewards (up to a factor of the batch), not their differences
    within a group."""
    return baseline == "none" and scale != "group"

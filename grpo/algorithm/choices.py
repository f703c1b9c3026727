"""Names of the algorithm's variants, for the configuration, the loss and the advantages.

docs/algorithm.md has the formula of each variant.
"""

# No import of torch: the configuration imports this file, and `--help` or a mistake in a key should
# not wait for torch.

from collections.abc import Sequence
from typing import Any, Literal, get_args

# Each set of names is a Literal type, so that pydantic refuses other names and lists the allowed
# names, and `--help` shows them.
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
    """Raise ValueError if ``value``, the value of the argument ``name``, is not in ``choices``.

    ``choices`` is a ``Literal`` type of this module.
    """
    # Loss and advantages may also be called without a configuration, so without pydantic's checks.
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(allowed)}")


def check_returned(name: str, value: Any, shape: Sequence[int]) -> None:
    """Raise ValueError if a user's function returned anything but a tensor of this shape.

    ``name`` is the name of the function in the error message.
    """
    returned = type(value).__name__
    # The attribute "detach" identifies a tensor without an import of torch.
    if hasattr(value, "detach"):
        returned = tuple(value.shape)
    if returned != tuple(shape):
        raise ValueError(f"{name} must return a tensor of shape {tuple(shape)}, got {returned}")

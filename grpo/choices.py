"""The named choices of an algorithm, each listed once: the configuration, the loss and the advantages read them here.

Imports no torch, because the configuration does not.
"""

from typing import Any, Literal, get_args

Objective = Literal["clip", "cispo", "reinforce"]
Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
Aggregation = Literal["response_mean", "token_mean", "constant"]
ImportanceLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]


def check_choice(name: str, value: str, choices: Any) -> None:
    """Refuse a value that is none of the choices.

    Args:
        name: of the argument, for the message.
        choices: one of the ``Literal`` types above.

    Raises:
        ValueError: naming the value and every choice.
    """
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use {', '.join(allowed[:-1])} or {allowed[-1]}")

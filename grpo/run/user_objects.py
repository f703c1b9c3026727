"""Python objects in place of names in the configuration. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class UserObjects:
    """Python objects of a program that calls :func:`grpo.train`, in place of what the configuration
    names."""

    rewards: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions, by their name in ``reward.functions``."""
    tools: dict[str, Any] = field(default_factory=dict)
    """Tools and an environment, by their name in the configuration."""
    train_rows: list[dict[str, Any]] | None = None
    eval_rows: list[dict[str, Any]] | None = None

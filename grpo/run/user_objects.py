"""Python objects that a program passes to ``grpo.train``."""

# Without torch: grpo.library imports this file, and `import grpo` must not take the seconds that
# importing torch takes.
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class UserObjects:
    """Python objects that a program passes to :func:`grpo.train`. In the configuration, names stand
    for these objects."""

    rewards: dict[str, Any] = field(
        default_factory=dict,
    )
    """Reward functions by their name in ``reward.functions``."""
    tools: dict[str, Any] = field(
        default_factory=dict,
    )
    """Tools and an environment by their name in the configuration."""
    train_rows: list[dict[str, Any]] | None = None
    """Rows to train on. Default: the rows of ``data.dataset``."""
    eval_rows: list[dict[str, Any]] | None = None
    """Rows to evaluate on. Default: the rows that the section ``data`` names."""


NO_OBJECTS = UserObjects()
"""Objects of a run that its configuration alone describes."""

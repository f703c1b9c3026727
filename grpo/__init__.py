"""GRPO in raw PyTorch: see ``train_grpo.py`` for the algorithm and ``docs/`` for the rest.

``from grpo import train`` trains from a notebook or a script, see ``docs/library.md``.
"""

from typing import Any

from grpo.system import set_environment_defaults

__version__ = "0.1.0"

# Before any module of the package imports torch, which reads the variables once.
set_environment_defaults()


def __getattr__(name: str) -> Any:
    """Import ``train`` and ``TrainingResult`` when they are asked for."""
    # Workers of rewards and tools import this package too, and need neither.
    if name in ("TrainingResult", "train"):
        from grpo import library

        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

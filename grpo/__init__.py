"""GRPO in raw PyTorch. ``train_grpo.py`` has the algorithm, and ``docs/`` explains the rest.

The function ``grpo.train`` trains a model from a notebook or a script (``docs/library.md``).
"""

from typing import Any

from grpo.system import set_environment_defaults

__version__ = "0.1.0"

# The variables are set before any module of the package imports torch, which reads them once.
set_environment_defaults()


def __getattr__(name: str) -> Any:
    """Return ``train`` or ``TrainingResult``, which are imported only when they are used."""
    # Worker processes for rewards and tools import this package too, and need neither name.
    if name in ("TrainingResult", "train"):
        from grpo import library

        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

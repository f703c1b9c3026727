"""GRPO in raw PyTorch: see ``train_grpo.py`` for the algorithm and ``docs/`` for the rest."""

from grpo.system.environment_defaults import set_environment_defaults

__version__ = "0.1.0"

set_environment_defaults()

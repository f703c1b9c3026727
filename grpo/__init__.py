"""GRPO in raw PyTorch: see ``train_grpo.py`` for the algorithm and ``docs/`` for the rest."""

__version__ = "0.1.0"

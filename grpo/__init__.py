"""GRPO in raw PyTorch: see ``train_grpo.py`` for the algorithm and ``docs/`` for the rest."""

import os

# oneDNN and PyTorch's interface to it each keep a kernel with its scratch memory for up to 1,024 shapes, and lengths differ in every step:
# under bf16 on the CPU that took 2 GB in 40 steps of a model of 7M parameters. Both read the variable at their first product.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "64")

__version__ = "0.1.0"

"""Runs whose models are divided over the ranks (``runtime.parallel=fsdp``): loading, checkpoints."""

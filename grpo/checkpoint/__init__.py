"""Checkpoints: their files, when they are written, and the step where a run starts."""

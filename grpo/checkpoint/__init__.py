"""Checkpoints of a run: their files, when they are saved, and from which checkpoint a run
starts."""

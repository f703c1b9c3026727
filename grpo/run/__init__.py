"""A run from its configuration to its end: prepare, checkpoint, stop, continue."""

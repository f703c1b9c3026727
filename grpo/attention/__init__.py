"""Attention that computes each prompt once for all completions of its group: ``packed`` when scoring, ``forked`` when decoding."""

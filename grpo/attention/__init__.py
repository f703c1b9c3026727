"""Attention that computes each prompt once per group: ``packed`` for scoring, ``forked`` for
decoding."""

from grpo.attention.forked import ForkedCache
from grpo.attention.layout import pack, pack_prompts, round_up_to_bucket
from grpo.attention.packed import (
    enable_packing,
    forked_hidden,
    packed_hidden,
    packing_enabled,
    window_of,
)

__all__ = [
    "ForkedCache",
    "enable_packing",
    "forked_hidden",
    "pack",
    "pack_prompts",
    "packed_hidden",
    "packing_enabled",
    "round_up_to_bucket",
    "window_of",
]

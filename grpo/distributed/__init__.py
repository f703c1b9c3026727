"""Everything that knows of other ranks: the only room that imports ``torch.distributed``."""

from grpo.distributed.world import (
    WORLD_KEYS,
    Interrupted,
    RanksDisagree,
    World,
    launched_as,
    open_noticeboard,
    start_world,
)

__all__ = [
    "WORLD_KEYS",
    "Interrupted",
    "RanksDisagree",
    "World",
    "launched_as",
    "open_noticeboard",
    "start_world",
]

"""Ranks: starting them, sums and votes over them, DDP, FSDP2. The only package that imports ``torch.distributed``.

Everything works the same under torchrun on GPUs (NCCL), under torchrun on the CPU (gloo), and in a single process without a launcher.
"""

from grpo.distributed.launch import available_cores, launch_environment, set_cpu_threads, start_world
from grpo.distributed.parallel import gradient_sync, wrap_data_parallel
from grpo.distributed.sharded import (
    Sharding,
    abandon_pass,
    compute_inside,
    gathered,
    give_back,
    is_sharded,
    local_bytes,
    share,
    whole,
)
from grpo.distributed.sharded_state import (
    divide_like,
    gathered_on_main,
    load_divided,
    names_of_divided,
    save_divided,
)
from grpo.distributed.store import SharedFlag, open_shared_flag
from grpo.distributed.world import Interrupted, OtherRankFailed, World

__all__ = [
    "Interrupted",
    "OtherRankFailed",
    "Sharding",
    "SharedFlag",
    "World",
    "abandon_pass",
    "available_cores",
    "compute_inside",
    "divide_like",
    "gathered",
    "gathered_on_main",
    "give_back",
    "gradient_sync",
    "is_sharded",
    "launch_environment",
    "load_divided",
    "local_bytes",
    "names_of_divided",
    "open_shared_flag",
    "save_divided",
    "set_cpu_threads",
    "share",
    "start_world",
    "whole",
    "wrap_data_parallel",
]

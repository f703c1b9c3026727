"""Ranks: starting them, sums and votes over them, DDP, FSDP2. The only package that imports ``torch.distributed``.

Everything works the same under torchrun on GPUs (NCCL), under torchrun on the CPU (gloo), and in a single process without a launcher.
"""

from grpo.distributed.launch import available_cores, launch_environment, set_cpu_threads, start_world
from grpo.distributed.parallel import gradient_sync, wrap_data_parallel
from grpo.distributed.sharded import (
    abandon_pass,
    compute_inside,
    gathered,
    give_back,
    is_sharded,
    load_tensors,
    local_bytes,
    optimizer_tensors,
    save_tensors,
    saved_names,
    shard,
    share,
    whole,
    whole_trained_weights,
)
from grpo.distributed.store import SharedFlag, open_shared_flag
from grpo.distributed.world import Interrupted, OtherRankFailed, World

__all__ = [
    "Interrupted",
    "OtherRankFailed",
    "SharedFlag",
    "World",
    "abandon_pass",
    "available_cores",
    "compute_inside",
    "gathered",
    "give_back",
    "gradient_sync",
    "is_sharded",
    "launch_environment",
    "load_tensors",
    "local_bytes",
    "open_shared_flag",
    "optimizer_tensors",
    "save_tensors",
    "saved_names",
    "set_cpu_threads",
    "shard",
    "share",
    "start_world",
    "whole",
    "whole_trained_weights",
    "wrap_data_parallel",
]

"""Ranks: starting them, sums and votes over them, DDP, FSDP2. The only package that imports ``torch.distributed``.

Everything works the same under torchrun on GPUs (NCCL), under torchrun on the CPU (gloo), and in a single process.
"""

from grpo.distributed.launch import available_cores, launch_environment, set_cpu_threads, start_world
from grpo.distributed.parallel import (
    abandon_pass,
    compute_inside,
    gathered,
    give_back,
    gradient_sync,
    is_sharded,
    shard,
    share,
    whole,
    wrap_data_parallel,
)
from grpo.distributed.tensors import (
    load_tensors,
    optimizer_tensors,
    save_tensors,
    saved_names,
    whole_trained_weights,
)
from grpo.distributed.world import Interrupted, OtherRankFailed, World

__all__ = ["Interrupted", "OtherRankFailed", "World", "abandon_pass", "available_cores", "compute_inside", "gathered"]
__all__ += ["give_back", "gradient_sync", "is_sharded", "launch_environment", "load_tensors"]
__all__ += ["optimizer_tensors", "save_tensors", "saved_names", "set_cpu_threads", "shard", "share", "start_world"]
__all__ += ["whole", "whole_trained_weights", "wrap_data_parallel"]

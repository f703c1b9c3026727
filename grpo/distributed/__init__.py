"""Ranks: starting them, sums and votes over them, DDP. The only package that imports ``torch.distributed``.

Everything works the same under torchrun on GPUs (NCCL), under torchrun on the CPU (gloo), and in a single process without a launcher.
"""

from grpo.distributed.launch import available_cores, launch_environment, set_cpu_threads, start_world
from grpo.distributed.parallel import gradient_sync, wrap_data_parallel
from grpo.distributed.store import SharedFlag, open_shared_flag
from grpo.distributed.world import Interrupted, OtherRankFailed, World

__all__ = [
    "Interrupted",
    "OtherRankFailed",
    "SharedFlag",
    "World",
    "available_cores",
    "gradient_sync",
    "launch_environment",
    "open_shared_flag",
    "set_cpu_threads",
    "start_world",
    "wrap_data_parallel",
]

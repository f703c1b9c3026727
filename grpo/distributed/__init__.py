"""Distributed training: start of ranks, sums and votes over ranks, DDP, FSDP2. No other package
imports ``torch.distributed``.

All functions work under torchrun on GPUs (NCCL), under torchrun on the CPU (gloo), and in a single
process.
"""

# ruff: noqa: F401, these names are for other packages

from grpo.distributed.launch import (
    available_cores,
    launch_environment,
    set_cpu_threads,
    start_world,
)
from grpo.distributed.parallel import (
    full_tensor,
    gradient_sync,
    is_sharded,
    local_shard,
    reshard,
    run_in_forward_pass,
    shard,
    unsharded,
    wrap_data_parallel,
)
from grpo.distributed.tensors import (
    create_optimizer_state,
    full_trained_weights,
    load_tensors,
    save_tensors,
    saved_names,
)
from grpo.distributed.world import Interrupted, OtherRankFailed, World

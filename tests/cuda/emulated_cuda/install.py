"""Puts the emulated device in the place of CUDA."""

from __future__ import annotations

import torch

from emulated_cuda.graphs import Graph, Stream
from emulated_cuda.tensors import MODE, device


def install() -> None:
    """From now on this process has one GPU."""
    device.stream = device.default_stream = Stream()
    replaced = dict(
        CUDAGraph=Graph,
        Stream=Stream,
        current_device=lambda: 0,
        current_stream=lambda *_: device.stream,
        set_stream=lambda stream: setattr(device, "stream", stream),
        set_device=lambda _: None,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=lambda: True,
        is_current_stream_capturing=device.is_capturing,
        is_bf16_supported=lambda *_: True,
        get_device_name=lambda *_: "emulated",
        get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda *_, **__: None,
        synchronize=lambda *_: device.sync("synchronize"),
        empty_cache=lambda: None,
        max_memory_allocated=lambda *_: 0,
    )
    for name, replacement in replaced.items():
        setattr(torch.cuda, name, replacement)
    torch._C._host_emptyCache = lambda: None
    # torch.tensor(values, device="cuda"): made on the host, then copied
    torch._C._set_only_lift_cpu_tensors(True)
    # model.to("cuda") keeps weights tied
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.backends.cuda.enable_flash_sdp(False)  # SDPA by its formula
    MODE.__enter__()

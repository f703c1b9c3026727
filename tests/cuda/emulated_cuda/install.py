"""Puts the emulated device in the place of CUDA."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from emulated_cuda.graphs import Graph, Stream
from emulated_cuda.tensors import MODE, CudaTensor, device


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
        get_device_properties=lambda *_: SimpleNamespace(
            name="emulated",
            major=9,
            minor=0,
            total_memory=device.memory_limit,
        ),
        get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda *_, **__: None,
        get_sync_debug_mode=lambda: device.sync_debug_mode,
        set_sync_debug_mode=lambda mode: setattr(device, "sync_debug_mode", mode),
        synchronize=lambda *_: device.sync("synchronize"),
        empty_cache=lambda: None,
        max_memory_allocated=lambda *_: device.peak,
        reset_peak_memory_stats=lambda *_: setattr(device, "peak", device.allocated),
        set_per_process_memory_fraction=device.limit_memory,
    )
    for name, replacement in replaced.items():
        setattr(torch.cuda, name, replacement)
    torch._C._host_emptyCache = lambda: None
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(values, device="cuda"): made on the host, then copied
    torch.__future__.set_swap_module_params_on_conversion(True)  # model.to("cuda") keeps weights tied
    F.scaled_dot_product_attention = functools.partial(attention, F.scaled_dot_product_attention)
    MODE.__enter__()


def attention(sdpa, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """SDPA by the formula. A problem where CUDA, without cuDNN's kernel, would not take a fused kernel but this."""
    if not isinstance(q, CudaTensor):
        return sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = (x.to(dtype) if x.dtype == torch.float32 else x for x in (q, k, v))
    width = q.shape[-1]
    takes_flash = q.dtype.itemsize == 2 and attn_mask is None and width <= 256
    takes_efficient = q.dtype != torch.float64 and q.shape[1] == k.shape[1] and width % 8 == 0
    if not takes_flash and not takes_efficient and q.dtype != torch.float64:
        device.problems.append(f"attention by the math kernel: {q.dtype} q{q.shape} k{k.shape}")
    math = torch.ops.aten._scaled_dot_product_attention_math
    return math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]

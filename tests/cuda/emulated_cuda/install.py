"""Puts the emulated device in the place of CUDA."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from emulated_cuda.graphs import Graph, Stream
from emulated_cuda.tensors import MODE, CudaTensor, device

PROPERTIES = dict(name="emulated", major=9, minor=0)


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
        get_device_properties=lambda *_: SimpleNamespace(**PROPERTIES, total_memory=device.memory_limit),
        get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda *_, **__: None,
        get_sync_debug_mode=lambda: device.sync_debug_mode,
        set_sync_debug_mode=lambda mode: setattr(device, "sync_debug_mode", mode),
        synchronize=lambda *_: device.sync("synchronize"),
        empty_cache=lambda: None,
        max_memory_allocated=lambda *_: device.peak,
        max_memory_reserved=lambda *_: device.peak,
        reset_peak_memory_stats=lambda *_: setattr(device, "peak", device.allocated),
    )
    for name, replacement in replaced.items():
        setattr(torch.cuda, name, replacement)
    torch._C._host_emptyCache = lambda: None
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(values, device="cuda"): made on the host, then copied
    torch.__future__.set_swap_module_params_on_conversion(True)  # model.to("cuda") keeps weights tied
    F.scaled_dot_product_attention = functools.partial(attention, F.scaled_dot_product_attention)
    MODE.__enter__()


def chosen_kernel(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False) -> str:
    """The kernel that SDPA chooses on CUDA without cuDNN's: flash, efficient, or math, which keeps all scores."""
    backends, half, D = torch.backends.cuda, q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    if backends.flash_sdp_enabled() and half and attn_mask is None and D <= 256 and v.shape[-1] == D:
        return "flash"
    is_aligned = D % (8 if half else 4) == 0 and v.shape[-1] % (8 if half else 4) == 0
    if backends.mem_efficient_sdp_enabled() and q.dtype != torch.float64 and q.shape[1] == k.shape[1] and is_aligned:
        return "efficient"
    return "math"


def attention(sdpa, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """SDPA with CUDA's choice of kernel. Fused ones are computed by the CPU's, which keeps no scores either."""
    q, k, v, mask, options = query, key, value, attn_mask, dict(scale=scale, enable_gqa=enable_gqa)
    if not isinstance(q, CudaTensor):
        return sdpa(q, k, v, mask, dropout_p, is_causal, **options)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v, mask = (x.to(dtype) if x is not None and x.dtype == torch.float32 else x for x in (q, k, v, mask))
    if chosen_kernel(q, k, v, mask, dropout_p, is_causal, **options) == "math":
        if q.dtype != torch.float64:
            device.problem(f"attention by the math kernel: {q.dtype} q{tuple(q.shape)} k{tuple(k.shape)}")
        return sdpa(q, k, v, mask, dropout_p, is_causal, **options)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    elif mask is not None and any(stride % 8 for stride in mask.stride()[:-1]):
        device.problem(f"attention copies its mask {tuple(mask.shape)}: its rows are not aligned")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) if enable_gqa else x for x in (k, v))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]

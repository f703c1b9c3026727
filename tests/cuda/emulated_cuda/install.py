"""Puts the emulated device in the place of CUDA. The guard of ``guard.cpp`` must have been loaded before torch."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_map

from emulated_cuda.graphs import Event, Graph, Stream, Streams, new_pool
from emulated_cuda.tensors import CUDA, MODE, CudaTensor, device, wrap

aten = torch.ops.aten
SYNC_MODES = {"default": 0, "warn": 1, "error": 2}


def install() -> None:
    """From now on this process has one GPU."""
    memory = {"memory_allocated": lambda *_: device.allocated, "memory_reserved": lambda *_: device.allocated}
    memory |= {"max_memory_allocated": lambda *_: device.peak, "max_memory_reserved": lambda *_: device.peak}
    replaced = memory | {
        "CUDAGraph": Graph, "Event": Event, "Stream": Stream,
        "_lazy_init": lambda: None, "current_device": lambda: 0, "current_stream": lambda *_: Streams.current,
        "default_stream": lambda *_: Streams.default, "device_count": lambda: 1, "empty_cache": lambda: None,
        "get_device_capability": lambda *_: (9, 0), "get_device_name": lambda *_: "emulated", "get_device_properties": _properties,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "get_sync_debug_mode": lambda: device.sync_debug_mode,
        "graph_pool_handle": new_pool, "is_available": lambda: True, "is_bf16_supported": lambda *_: True,
        "is_current_stream_capturing": lambda: device.is_capturing(), "is_initialized": lambda: True, "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None, "mem_get_info": lambda *_: (device.memory_limit - device.allocated, device.memory_limit),
        "reset_peak_memory_stats": _reset_peak, "set_device": lambda _: None, "set_rng_state": lambda *_, **__: None,
        "set_stream": Streams.use, "set_sync_debug_mode": _set_sync_debug_mode, "synchronize": lambda *_: device.sync("synchronize"),
    }  # fmt: skip
    for name, replacement in replaced.items():
        setattr(torch.cuda, name, replacement)
    torch._C._host_emptyCache = lambda: None
    torch._C._cuda_endAllocateToPool = lambda _, pool: device.pools_in_use.discard(pool)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(values, device="cuda"): made on the host, then copied
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.nn.Module.to = _module_to(torch.nn.Module.to)
    torch.load = _load(torch.load)
    torch.profiler.profile = _profile(torch.profiler.profile)
    torch.nn.functional.scaled_dot_product_attention = _attention(torch.nn.functional.scaled_dot_product_attention)
    MODE.__enter__()


def _properties(*_) -> SimpleNamespace:
    values = dict(name="emulated", major=9, minor=0, multi_processor_count=132, warp_size=32)
    return SimpleNamespace(**values, total_memory=device.memory_limit)


def _reset_peak(*_) -> None:
    device.peak = device.allocated


def _set_sync_debug_mode(mode: int | str) -> None:
    device.sync_debug_mode = SYNC_MODES.get(mode, mode)


def _module_to(original):
    """``Module.to`` that keeps weights tied: PyTorch replaces the parameter of each module where the tensor's class changes."""

    @functools.wraps(original)
    def to(module, *args, **kwargs):
        target = torch._C._nn._parse_to(*args, **kwargs)[0]
        if target is None or target.type != "cuda":
            return original(module, *args, **kwargs)
        moved = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and not isinstance(parameter, CudaTensor):
                    if parameter not in moved:
                        moved[parameter] = torch.nn.Parameter(
                            CudaTensor(parameter.detach().clone()), parameter.requires_grad
                        )
                    part._parameters[name] = moved[parameter]
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(CUDA)
        return module

    return to


def _profile(original):
    """The profiler without CUDA's events, which a CPU build of PyTorch cannot record."""
    return lambda activities, **options: original(activities=[torch.profiler.ProfilerActivity.CPU], **options)


def _load(original):
    """``torch.load`` with ``map_location`` on the emulated device."""

    @functools.wraps(original)
    def load(*args, map_location=None, **kwargs):
        if map_location is None or torch.device(map_location).type != "cuda":
            return original(*args, map_location=map_location, **kwargs)
        return tree_map(wrap, original(*args, map_location="cpu", **kwargs))

    return load


def chosen_kernel(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False) -> str:
    """The kernel that SDPA chooses on CUDA with cuDNN's switched off: ``flash``, ``efficient``, or ``math``, which writes all scores to memory."""
    backends, half, D = torch.backends.cuda, q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    if backends.flash_sdp_enabled() and half and attn_mask is None and D <= 256 and v.shape[-1] == D:
        return "flash"
    is_aligned = D % (8 if half else 4) == 0 and v.shape[-1] % (8 if half else 4) == 0
    if backends.mem_efficient_sdp_enabled() and q.dtype != torch.float64 and q.shape[1] == k.shape[1] and is_aligned:
        return "efficient"
    return "math"


def _attention(original):
    """``scaled_dot_product_attention`` with CUDA's choice of kernel. A CPU build of PyTorch would take the math kernel for every CUDA tensor."""

    @functools.wraps(original)
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if not isinstance(query, CudaTensor):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        q, k, v, mask = query, key, value, attn_mask
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            q, k, v, mask = (x.to(dtype) if x is not None and x.dtype == torch.float32 else x for x in (q, k, v, mask))
        kernel = chosen_kernel(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        shown = f"{kernel} {str(q.dtype).removeprefix('torch.')}"
        device.attention[shown] += 1
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        if kernel == "math":
            if q.dtype != torch.float64 and torch.backends.cuda.mem_efficient_sdp_enabled():
                device.problem(f"attention by the math kernel: {q.dtype} q{tuple(q.shape)} k{tuple(k.shape)}")
            return original(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=CUDA).masked_fill(~mask, float("-inf"))
        elif mask is not None and (any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1):
            device.problem(f"attention copies its mask {tuple(mask.shape)}: its rows are not aligned")
        if mask is not None:
            mask = mask.expand(*q.shape[:3], k.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]

    return attention

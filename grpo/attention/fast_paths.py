"""Functions that ``torch.compile`` makes faster on CUDA, in parts that are switched on by name.

All parts are off at first. A check compares each with the same functions without the compiler:
log-probs at a run's start (:mod:`grpo.run.proofs`), decode steps together with the CUDA graph that
they are captured in (:mod:`grpo.rollout.cuda_graphs`). Measurements on an H100 are in
``benchmarks/results/h100.md``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

SCORES = "compiled log-probs"
"""Name of the part that computes log-probs, entropies and their gradient."""
STEP = "compiled decode steps"
"""Name of the part that computes decode steps between the products with weights."""

_on: set[str] = set()
_beyond_limit: set[str] = set()
"""Parts that have reached dynamo's limit of compilations, and stay off."""


def may_use(device: torch.device) -> bool:
    """True if functions may be compiled: on CUDA, if neither PyTorch nor the user forbids it."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    return os.environ.get("TORCHDYNAMO_DISABLE") != "1"


def is_on(part: str) -> bool:
    return part in _on


def switch_on(*parts: str) -> None:
    _on.update(parts)
    _on.difference_update(_beyond_limit)


@contextlib.contextmanager
def only(*parts: str) -> Iterator[None]:
    """Inside the block these parts are on and all others off."""
    before = set(_on)
    _on.clear()
    switch_on(*parts)
    try:
        yield
    finally:
        _on.clear()
        switch_on(*before)


def reset() -> None:
    """Switch all parts off and forget what has been compiled: another run begins."""
    _on.clear()
    _beyond_limit.clear()
    if _compile.cache_info().currsize:
        _compile.cache_clear()
        torch._dynamo.reset()


def compiled(part: str) -> Callable[[Callable], Callable]:
    """Decorate a function whose tensors all have the rows of a batch as their first dimension.

    While the part is on, calls go to the compiled function. ``torch.compile`` makes one variant for
    all numbers of rows, and one for each combination of other sizes, strides, dtypes and remaining
    arguments. No tensor may require a gradient, which would be another variant.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            # Dynamo never treats 0 and 1 as dynamic sizes: each would be another variant.
            if part not in _on or len(args[0]) < 2:
                return function(*args)
            for x in args:
                if isinstance(x, Tensor):
                    torch._dynamo.mark_dynamic(x, 0)
            try:
                return _compile(function)(*args)
            except torch._dynamo.exc.FailOnRecompileLimitHit:
                _on.discard(part)
                _beyond_limit.add(part)
                limit = torch._dynamo.config.recompile_limit
                reason = f"{limit} variants are dynamo's limit"
                print(f"note      without {part} from now on ({reason})", flush=True)
                return function(*args)

        return call

    return decorate


@functools.cache
def _compile(function: Callable) -> Callable:
    """The function, which its first call compiles.

    With ``fullgraph`` dynamo raises an error at its limit, where it would else go on uncompiled.
    """
    return torch.compile(function, fullgraph=True)

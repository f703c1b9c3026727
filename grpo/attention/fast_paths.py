"""Faster ways to compute on CUDA, by ``torch.compile``: off until a check has found them right.

Each part named below has plain code beside it, which computes the same on every device. A run's start compares both
with the run's own model (:func:`prove`), and keeps to the plain code, with a line, where they differ or where the
faster way raises an error: without a C compiler, or in a version of PyTorch that lacks it. With
``runtime.deterministic`` all parts stay off; with ``TORCHDYNAMO_DISABLE=1`` nothing is compiled.

What an H100 has shown of each part: ``benchmarks/results/h100.md``. Tests compile the same functions for the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

SCORES = "compiled log-probs"
STEP = "compiled decode steps"

_on: set[str] = set()


def is_on(part: str) -> bool:
    return part in _on


@contextlib.contextmanager
def only(*parts: str) -> Iterator[None]:
    """Inside the block these parts are on and all others off."""
    before = set(_on)
    _on.clear()
    _on.update(parts)
    try:
        yield
    finally:
        _on.clear()
        _on.update(before)


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    with only(*_on - {part}):
        yield


def compiled(part: str) -> Callable[[Callable], Callable]:
    """Decorates a function of tensors: ``torch.compile`` of it while the part is on, itself otherwise.

    The function must call no other decorated one, or it would be compiled again whenever that one's part is switched.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return (_compile(function, part) if part in _on else function)(*args)

        return call

    return decorate


@functools.cache
def _compile(function: Callable, part: str) -> Callable:
    """Compiled at its first call, with dynamic shapes."""
    return torch.compile(function, dynamic=True)


def switch_off(*parts: str) -> None:
    """An earlier run of this process may have left them on."""
    _on.difference_update(parts)


def may_use(device: torch.device) -> bool:
    """False where no part is to be tried."""
    return device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()


def prove(
    part: str, compute: Callable[[], Iterable[Tensor]], tolerance: float, agree: Callable[[bool], bool] = bool
) -> list[str]:
    """Switch a part on if ``compute()`` gives the tensors of the plain code; else return a line that says why not.

    Args:
        compute: the tensors, with the parts that are on.
        tolerance: most root mean square of the differences, relative to the standard deviation of the plain values.
        agree: turns this rank's verdict into that of all ranks.
    """
    reason = "it failed on another rank"
    try:
        with only():
            expected = list(compute())
        _on.add(part)
        if part == SCORES and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            raise RuntimeError("TORCHDYNAMO_DISABLE=1, and without a compiler it takes more memory")
        for plain, found in zip(expected, compute(), strict=True):
            if plain.numel() < 2:  # a rank's share may be empty, and one number has no standard deviation
                continue
            error = (found.double() - plain.double()).square().mean().sqrt() / plain.double().std().clamp(min=1e-30)
            if not error <= tolerance:
                raise ArithmeticError(f"its results differ by {float(error):.2g}")
        is_right = True
    except Exception as error:  # of a compiler or kernel that is not ours; or memory runs out
        is_right, reason = False, (str(error).strip() or type(error).__name__).splitlines()[0]
    if agree(is_right):
        return []
    _on.discard(part)
    return [f"note      without {part} ({reason})"]

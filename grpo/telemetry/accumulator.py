"""Collects the numbers of one step, and reduces them over ranks once at its end."""

import math
from itertools import groupby

import torch

from grpo.distributed import World


class Accumulator:
    """Means, totals, minima and maxima of one step.

    A mean is a (sum, count), added over rows, micro-batches and ranks, and divided at the end: a mean of means would
    give a short micro-batch the weight of a long one.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[torch.Tensor | float, torch.Tensor | float]]] = {}
        """Name -> what was added, as (sum, count); tensors stay on their device until the step's end."""
        self._totals: set[str] = set()
        """Names in ``_pairs`` that are reported as the sum, not as sum / count."""
        self._minima: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float = 1.0) -> None:
        """Add a sum and the number of values in the sum."""
        self._pairs.setdefault(name, []).append((total, count))

    def total(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a metric that is reported as a sum, not as a mean."""
        self.add(name, value, 0.0)
        self._totals.add(name)

    def add_values(self, name: str, values: torch.Tensor) -> None:
        """Add several values to a mean; NaN and infinite values are left out."""
        finite = values[torch.isfinite(values)].double()
        self.add(name, finite.sum(), float(finite.numel()))

    def add_all(self, stats: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add several metrics, each as ``(sum, count)``."""
        for name, (total, count) in stats.items():
            self.add(name, total, count)

    def maximum(self, name: str, value: float) -> None:
        self._maxima[name] = max(value, self._maxima.get(name, -math.inf))

    def minimum(self, name: str, value: float) -> None:
        self._minima[name] = min(value, self._minima.get(name, math.inf))

    def mean(self, name: str) -> float:
        """The mean so far on this rank; NaN if nothing was counted."""
        total, count = self._sums([name])[0].tolist()
        return total / count if count else math.nan

    def _sums(self, names: list[str]) -> torch.Tensor:
        """``[names, 2]`` sums and counts in float64 on the host, which waits for the device once."""
        values = [value for name in names for pair in self._pairs[name] for value in pair]
        on_device = [value for value in values if isinstance(value, torch.Tensor) and not value.is_cpu]
        on_device.sort(key=lambda value: str(value.dtype))
        parts = [torch.stack(list(part)).double() for _, part in groupby(on_device, key=lambda value: value.dtype)]
        on_host = dict(zip(map(id, on_device), torch.cat(parts).tolist() if parts else (), strict=True))

        def number(x: torch.Tensor | float) -> float:
            return on_host[id(x)] if id(x) in on_host else float(x)

        sums = [[sum(map(number, column)) for column in zip(*self._pairs[name], strict=True)] for name in names]
        return torch.tensor(sums, dtype=torch.float64)

    def reduce(self, world: World) -> dict[str, float]:
        """The metrics over all ranks, by one sum and one maximum. All ranks must have added the same names."""
        metrics: dict[str, float] = {}
        if names := sorted(self._pairs):
            sums = world.sum(self._sums(names)).tolist()
            for name, (total, count) in zip(names, sums, strict=True):
                metrics[name] = total if name in self._totals else total / count if count else 0.0
        # The minimum over ranks is minus the maximum of the negatives, so that one collective serves both.
        extremes = self._maxima | {name: -value for name, value in self._minima.items()}
        if names := sorted(extremes):
            reduced = world.max(torch.tensor([extremes[name] for name in names], dtype=torch.float64)).tolist()
            signs = [-1 if name in self._minima else 1 for name in names]
            metrics |= {name: sign * value for name, sign, value in zip(names, signs, reduced, strict=True)}
        return metrics

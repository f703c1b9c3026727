"""Collects the numbers of one step, and reduces them over ranks once at its end."""

import math

import torch

from grpo.distributed import World


class Accumulator:
    """Means, totals, minima and maxima of one step.

    A mean is a (sum, count), added over rows, micro-batches and ranks, and divided at the end: a mean of means would
    give a short micro-batch the weight of a long one.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, torch.Tensor] = {}
        """Name -> ``[sum, count]``."""
        self._totals: set[str] = set()
        """Names in ``_pairs`` that are reported as the sum, not as sum / count."""
        self._minima: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float = 1.0) -> None:
        """Add a sum and the number of values in the sum."""
        total = torch.as_tensor(total, dtype=torch.float64)
        pair = torch.stack([total, torch.as_tensor(count, dtype=torch.float64, device=total.device)])
        known = self._pairs.get(name)
        self._pairs[name] = pair if known is None else known + pair.to(known.device)

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
        total, count = self._pairs[name].tolist()
        return total / count if count else math.nan

    def reduce(self, world: World) -> dict[str, float]:
        """The metrics over all ranks, by one sum and one maximum. All ranks must have added the same names."""
        metrics: dict[str, float] = {}
        if names := sorted(self._pairs):
            on_device = [name for name in names if not self._pairs[name].is_cpu]
            on_host = dict(self._pairs)
            if on_device:  # one copy of all
                on_host |= zip(on_device, torch.stack([self._pairs[name] for name in on_device]).cpu(), strict=True)
            sums = world.sum(torch.stack([on_host[name] for name in names])).tolist()
            for name, (total, count) in zip(names, sums, strict=True):
                metrics[name] = total if name in self._totals else total / count if count else 0.0
        # The minimum over ranks is minus the maximum of the negatives, so that one collective serves both.
        extremes = self._maxima | {name: -value for name, value in self._minima.items()}
        if names := sorted(extremes):
            reduced = world.max(torch.tensor([extremes[name] for name in names], dtype=torch.float64)).tolist()
            signs = [-1 if name in self._minima else 1 for name in names]
            metrics |= {name: sign * value for name, sign, value in zip(names, signs, reduced, strict=True)}
        return metrics

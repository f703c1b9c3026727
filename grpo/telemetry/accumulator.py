"""Collects the numbers of one step, and reduces them over ranks once at its end."""

import math

import torch
from torch import Tensor

from grpo.distributed import World


class Accumulator:
    """Means, totals, minima and maxima of one step.

    A mean is a (sum, count), added over rows, micro-batches and ranks, and divided at the end: a
    mean of means would give a short micro-batch the weight of a long one. A mean of nothing is NaN,
    and an extreme of nothing infinite: ``metrics.jsonl`` has null there, where a 0 would pass for a
    measured number.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}
        """Name -> ``[sum, count]``."""
        self._totals: set[str] = set()
        """Names in ``_pairs`` that are reported as the sum, not as sum / count."""
        self._maxima: dict[str, float] = {}
        self._minima: set[str] = set()
        """Names in ``_maxima`` of minima, which have the opposite sign there: one collective
        reduces both."""

    def add(
        self,
        name: str,
        total: Tensor | float,
        count: Tensor | float = 1.0,
    ) -> None:
        """Add a sum and the number of values in the sum."""
        total = torch.as_tensor(total, dtype=torch.float64)
        count = torch.as_tensor(
            count,
            dtype=torch.float64,
            device=total.device,
        )
        pair = torch.stack([total, count])
        known = self._pairs.get(name)
        if known is not None:
            pair = known + pair.to(known.device)
        self._pairs[name] = pair

    def total(self, name: str, value: Tensor | float) -> None:
        """Add to a metric that is reported as a sum, not as a mean."""
        self.add(name, value, 0.0)
        self._totals.add(name)

    def add_all(
        self,
        stats: dict[str, tuple[Tensor, Tensor]],
    ) -> None:
        """Add several metrics, each as ``(sum, count)``."""
        for name, pair in stats.items():
            self.add(name, *pair)

    def maximum(self, name: str, value: float) -> None:
        """Add a value to a maximum; -infinity for none."""
        known = self._maxima.get(name, -math.inf)
        self._maxima[name] = max(value, known)

    def minimum(self, name: str, value: float) -> None:
        """Add a value to a minimum; infinity for none."""
        self.maximum(name, -value)
        self._minima.add(name)

    def reduce(self, world: World) -> dict[str, float]:
        """The metrics over all ranks, by one sum and one maximum.

        All ranks must have added the same names.
        """
        metrics = {}
        names = sorted(self._pairs)
        if names:
            # One tensor of all is copied to the host once: each copy would wait for the device.
            pairs = [self._pairs[name].to(world.device) for name in names]
            reduced = world.sum(torch.stack(pairs)).tolist()
            for name, (total, count) in zip(names, reduced, strict=True):
                if name in self._totals:
                    metrics[name] = total
                else:
                    metrics[name] = total / count if count else math.nan

        names = sorted(self._maxima)
        if names:
            values = [self._maxima[name] for name in names]
            reduced = world.max(torch.tensor(values, dtype=torch.float64))
            for name, value in zip(names, reduced.tolist(), strict=True):
                metrics[name] = -value if name in self._minima else value
        return metrics

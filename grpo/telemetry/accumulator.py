"""The metrics of one step: collected on each rank, reduced over ranks once at the end."""

import math

import torch
from torch import Tensor

from grpo.distributed import World


class Accumulator:
    """Means, totals, minima and maxima of one step.

    A mean is a pair (sum, count), added over rows, micro-batches and ranks, and divided at the end:
    a mean of means would give a short micro-batch the weight of a long one. A mean of nothing is
    NaN, and an extreme of nothing infinite: ``metrics.jsonl`` has null there, where a 0 would pass
    for a measured number.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}
        """Name -> ``[sum, count]`` of means and totals."""
        self._totals: set[str] = set()
        """Names in ``_pairs`` that are reported as the sum, not as sum / count."""
        self._maxima: dict[str, float] = {}
        """Name -> the largest value; of minima, the negated smallest one."""
        self._minima: set[str] = set()
        """Names in ``_maxima`` that are minima: one collective reduces both kinds."""

    def add(
        self,
        name: str,
        total: Tensor | float,
        count: Tensor | float = 1.0,
    ) -> None:
        """Add to a mean: a sum, and the number of values in the sum."""
        # float64, since float32 cannot count beyond 16.7 million tokens. Tensors stay on their
        # device: reading one here would wait for the device.
        total = torch.as_tensor(
            total,
            dtype=torch.float64,
        )
        count = torch.as_tensor(
            count,
            dtype=torch.float64,
            device=total.device,
        )
        pair = torch.stack([total, count])
        previous = self._pairs.get(name)
        if previous is not None:
            pair = previous + pair.to(previous.device)
        self._pairs[name] = pair

    def total(
        self,
        name: str,
        value: Tensor | float,
    ) -> None:
        """Add to a total: a metric that is reported as the sum over all ranks."""
        self.add(name, value, 0.0)
        self._totals.add(name)

    def add_all(
        self,
        stats: dict[str, tuple[Tensor, Tensor]],
    ) -> None:
        """Add to several means, each given as name -> ``(sum, count)``."""
        for name, pair in stats.items():
            self.add(name, *pair)

    def maximum(self, name: str, value: float) -> None:
        """Add a value to a maximum. A rank without a value adds -infinity."""
        previous = self._maxima.get(name, -math.inf)
        self._maxima[name] = max(value, previous)

    def minimum(self, name: str, value: float) -> None:
        """Add a value to a minimum. A rank without a value adds infinity."""
        self.maximum(name, -value)
        self._minima.add(name)

    def reduce(self, world: World) -> dict[str, float]:
        """The metrics over all ranks, by one sum and one maximum. All ranks call it together.

        All ranks must have added the same names.
        """
        metrics = {}
        # Ranks may have added the names in another order, but the tensors need the same one.
        names = sorted(self._pairs)
        if names:
            # One tensor of all is copied to the host once: each copy would wait for the device.
            pairs = [self._pairs[name].to(world.device) for name in names]
            sums = world.sum(torch.stack(pairs))
            for name, (total, count) in zip(names, sums.tolist(), strict=True):
                if name in self._totals:
                    metrics[name] = total
                elif count:
                    metrics[name] = total / count
                else:
                    metrics[name] = math.nan

        names = sorted(self._maxima)
        if names:
            values = [self._maxima[name] for name in names]
            values = torch.tensor(values, dtype=torch.float64)
            maxima = world.max(values)
            for name, value in zip(names, maxima.tolist(), strict=True):
                if name in self._minima:
                    value = -value
                metrics[name] = value
        return metrics

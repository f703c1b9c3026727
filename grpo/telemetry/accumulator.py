"""The metrics of one step: collected on each rank, reduced over ranks once at the end."""

import math

import torch
from torch import Tensor

from grpo.distributed import World


class Accumulator:
    """Means, totals and maxima of one step.

    A mean is a pair (sum, count). Pairs are added over rows, micro-batches and ranks, and divided
    at the end, because a mean of means would give a short micro-batch the weight of a long one. A
    mean without values is NaN, and a maximum without values is infinite.
    ``metrics.jsonl`` then has null, where a 0 would pass for a measured number.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}
        """Name of a mean or a total -> ``[sum, count]``."""
        self._totals: set[str] = set()
        """Names in ``_pairs`` that are reported as the sum, not as sum / count."""
        self._maxima: dict[str, float] = {}
        """Name of a maximum -> largest value."""

    def add(
        self,
        name: str,
        total: Tensor | float,
        count: Tensor | float = 1.0,
    ) -> None:
        """Add ``count`` values, whose sum is ``total``, to the mean ``name``."""
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
        """Add ``value`` to the total ``name``, a metric that is reported as the sum over all
        ranks."""
        self.add(name, value, 0.0)
        self._totals.add(name)

    def add_all(
        self,
        stats: dict[str, tuple[Tensor, Tensor]],
    ) -> None:
        """Add to several means. ``stats`` maps each name to ``(sum, count)``."""
        for name, pair in stats.items():
            self.add(name, *pair)

    def maximum(self, name: str, value: float) -> None:
        """Set the maximum ``name`` to ``value`` if ``value`` is larger. A rank without a value
        passes -infinity."""
        previous = self._maxima.get(name, -math.inf)
        self._maxima[name] = max(value, previous)

    def reduce(self, world: World) -> dict[str, float]:
        """Return the metrics over all ranks, by one collective sum and one collective maximum.

        All ranks call it together. Names of means may be missing on some ranks.
        """
        metrics = {}
        # A user's function may return a metric on some ranks only, and the tensors need the same
        # names in the same order.
        names = sorted(set().union(*world.gather_objects(set(self._pairs))))
        # All pairs are copied to the host as one tensor, since each copy would wait for the
        # device.
        nothing = torch.zeros(2, dtype=torch.float64)
        pairs = [self._pairs.get(name, nothing).to(world.device) for name in names]
        sums = world.sum(torch.stack(pairs)).cpu()
        for name, (value, count) in zip(names, sums, strict=True):
            # The mean of no value is 0 / 0, which is NaN.
            if name not in self._totals:
                value = value / count
            metrics[name] = value.item()

        names = sorted(self._maxima)
        values = [self._maxima[name] for name in names]
        values = torch.tensor(values, dtype=torch.float64)
        maxima = world.max(values)
        metrics |= zip(names, maxima.tolist(), strict=True)
        return metrics

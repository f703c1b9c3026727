"""Hints name problems that an experienced person would see in the metrics, and what to do about
each problem (``docs/metrics.md``)."""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from grpo.telemetry.records import is_computed

MAX_STEPS_OF_MEAN = 10
"""Largest number of steps in the mean of a metric. The mean is over the last steps of the run."""
MIN_STEPS_OF_MEAN = 3
"""Number of steps after which hints begin. The mean of one or two steps says little."""


@dataclass(frozen=True)
class HintRule:
    """A hint, and the metric that it depends on."""

    name: str
    """Name of the hint in ``docs/metrics.md``."""
    metric: str
    """Name of the metric whose mean over the last steps is compared with the limits."""
    text: str
    """The hint, with ``{mean}`` in the place of the mean, and ``{higher_rate}`` in the place
    of ten times the highest learning rate so far."""
    above: float = math.inf
    """The hint holds if the mean is above this limit. Default: no limit."""
    below: float = -math.inf
    """The hint holds if the mean is below this limit. Default: no limit."""
    min_steps: int = 1
    """Number of steps before which the hint does not hold."""
    unless: Collection[str] = ()
    """Names of rules before this one, whose hints explain the metric too."""


HINT_RULES = [
    HintRule(**rule) for rule in yaml.safe_load(Path(__file__).with_name("hints.yaml").read_bytes())
]


class Hints:
    """Hints on a run. :meth:`update` takes the metrics of each step in turn, and returns each hint
    once."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        """Names of the hints that :meth:`update` has returned."""
        self._peak_rate = 0.0
        """Highest learning rate of the steps so far."""
        self._steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS_OF_MEAN)

    def update(self, metrics: dict[str, Any]) -> list[str]:
        """Take the metrics of a step, and return the hints that hold for the first time."""
        # The line of an evaluation before training has no reward.
        if "reward" not in metrics:
            return []
        self._steps.append(metrics)
        self._peak_rate = max(self._peak_rate, metrics.get("learning_rate", 0.0))
        # If no completion of a step has a score, that is a mistake and not chance.
        if len(self._steps) < MIN_STEPS_OF_MEAN and metrics.get("frac_unscorable") != 1:
            return []
        hints = self.verdict()
        new = [hint for name, hint in hints.items() if name not in self.given]
        self.given.update(hints)
        return new

    def verdict(self) -> dict[str, str]:
        """Return all hints that hold for the last steps, by the names of their rules. Hints that
        were given before are included."""
        hints = {}
        for rule in HINT_RULES:
            if len(self._steps) < rule.min_steps or hints.keys() & rule.unless:
                continue
            values = [step.get(rule.metric) for step in self._steps]
            values = list(filter(is_computed, values))
            # A metric that was never computed gives no hint: NaN is neither above nor below.
            mean = fmean(values) if values else math.nan
            if mean > rule.above or mean < rule.below:
                hints[rule.name] = rule.text.format(mean=mean, higher_rate=10 * self._peak_rate)
        return hints

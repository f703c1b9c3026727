"""The accumulator: weights of means, and no number for what nothing was added to."""

import math

import torch

from grpo.distributed import World
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.records import json_safe

ONE_RANK = World(0, 1, torch.device("cpu"))


def test_sums_means_and_extremes_by_hand():
    metrics = Accumulator()
    metrics.add("loss", 6.0, 3)
    metrics.add("loss", torch.tensor(1.0), torch.tensor(1))
    metrics.add("entropy", 0.0, 0)
    for count in (5, 7):
        metrics.total("tokens", count)
    metrics.maximum("nothing", -math.inf)
    for length in (4.0, 9.0, 2.0):
        metrics.maximum("longest", length)
    expected = {
        "entropy": None,
        "loss": 7 / 4,
        "tokens": 12,
        "longest": 9.0,
        "nothing": None,
    }
    assert json_safe(metrics.reduce(ONE_RANK)) == expected
    metrics.add("entropy", 3.0, 2)
    metrics.maximum("nothing", 4.0)
    assert metrics.reduce(ONE_RANK) == expected | {"entropy": 1.5, "nothing": 4.0}

"""The accumulator: weights of means, and no number for what nothing was added to."""

import math

import torch

from grpo.distributed import World
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.records import is_computed, json_safe

ONE_RANK = World(0, 1, 0, torch.device("cpu"))


def test_a_mean_is_the_total_sum_over_the_total_count():
    metrics = Accumulator()
    metrics.add("loss", 6.0, 3)
    metrics.add("loss", torch.tensor(1.0), torch.tensor(1))
    metrics.total("tokens", 5)
    metrics.total("tokens", 7)
    metrics.total("errors", 0)
    for length in (4.0, 9.0, 2.0):
        metrics.maximum("longest", length)
        metrics.minimum("shortest", length)
    assert metrics.reduce(ONE_RANK) == {
        "loss": 7 / 4, "tokens": 12, "errors": 0, "longest": 9.0, "shortest": 2.0,
    }  # fmt: skip


def test_what_was_not_computed_is_no_number():
    metrics = Accumulator()
    metrics.add("entropy", 0.0, 0)
    metrics.add("kl", 0.0, 2)
    metrics.minimum("shortest", math.inf)
    metrics.maximum("longest", -math.inf)
    reduced = metrics.reduce(ONE_RANK)
    assert json_safe(reduced) == {"entropy": None, "kl": 0.0, "shortest": None, "longest": None}
    assert [name for name, value in reduced.items() if is_computed(value)] == ["kl"]
    metrics.add("entropy", 3.0, 2)
    metrics.minimum("shortest", 4.0)
    assert json_safe(metrics.reduce(ONE_RANK)) == {"entropy": 1.5, "kl": 0.0, "shortest": 4.0, "longest": None}

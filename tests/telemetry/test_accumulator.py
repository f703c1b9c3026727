"""The accumulator: weights of means."""

import torch

from grpo.distributed import World
from grpo.telemetry.accumulator import Accumulator

ONE_RANK = World(0, 1, 0, torch.device("cpu"))


def test_a_mean_is_the_total_sum_over_the_total_count():
    metrics = Accumulator()
    metrics.add("loss", 6.0, 3)
    metrics.add("loss", torch.tensor(1.0), torch.tensor(1))
    metrics.total("tokens", 5)
    metrics.total("tokens", 7)
    metrics.add("empty", 0.0, 0)
    metrics.add_values("reward", torch.tensor([1.0, float("nan"), 3.0]))
    for length in (4.0, 9.0, 2.0):
        metrics.maximum("longest", length)
        metrics.minimum("shortest", length)
    assert metrics.reduce(ONE_RANK) == {
        "loss": 7 / 4, "tokens": 12, "empty": 0.0, "reward": 2.0, "longest": 9.0, "shortest": 2.0,
    }  # fmt: skip

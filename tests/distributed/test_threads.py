"""The number of CPU threads of a rank, and where it comes from."""

import pytest
import torch

from grpo.config import RuntimeConfig
from grpo.distributed import launch, set_cpu_threads


@pytest.mark.parametrize(
    ("key", "variable", "ranks", "expected"),
    [
        (None, None, 1, 8),
        (None, None, 3, 2),
        (None, "1", 1, 1),
        (None, "5", 1, 5),
        (None, "5", 2, 5),
        (None, "1", 2, 4),  # torchrun sets 1
        (None, "4,2", 1, 4),
        (None, "many", 1, 8),
        (3, "1", 1, 3),
        (1, None, 2, 1),
    ],
)
def test_threads_of_a_rank(monkeypatch, key, variable, ranks, expected):
    """On a machine with 8 cores."""
    before = torch.get_num_threads()
    monkeypatch.setattr(launch, "available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    set_cpu_threads(RuntimeConfig(threads_per_rank=key), ranks)
    try:
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)

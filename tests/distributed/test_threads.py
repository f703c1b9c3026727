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
        (None, "1", 2, 4),  # torchrun sets 1
        (None, "1", 1, 7),  # 7: PyTorch's own choice, by OMP_NUM_THREADS, stays
        (None, "5", 2, 7),
        (3, "1", 1, 3),
    ],
)
def test_threads_of_a_rank(monkeypatch, key, variable, ranks, expected):
    """On a machine with 8 cores."""
    torch.set_num_threads(7)
    monkeypatch.setattr(launch, "available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    set_cpu_threads(RuntimeConfig(threads_per_rank=key), ranks)
    assert torch.get_num_threads() == expected

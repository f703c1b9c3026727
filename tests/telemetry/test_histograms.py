"""The histogram of importance ratios."""

import itertools

import pytest
import torch

from grpo.telemetry.histograms import RATIO_EDGES, ratio_histogram


def test_ratios_are_counted_in_their_bins():
    ratio_BT = torch.tensor([[1.0, 1.004, 1.5, 7.0], [0.3, 2.0, float("nan"), 1.0]])
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    counts = ratio_histogram(ratio_BT, mask_BT)
    centres = [(low + high) / 2 for low, high in itertools.pairwise(RATIO_EDGES)]
    found = {round(centre, 2): n for centre, n in zip(centres, counts.tolist(), strict=True) if n}
    assert found == {0.3: 1, 1.0: 2, 1.5: 1, 2.0: 2}, "7 is counted in the last bin, masked positions nowhere"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bins_are_half_open(dtype):
    """Against counting by comparison; some ratios lie exactly on an edge."""
    generator = torch.Generator().manual_seed(0)
    random = torch.exp(0.5 * torch.randn(7, 300, generator=generator, dtype=torch.float64))
    edges_E = torch.tensor(RATIO_EDGES, dtype=torch.float64).to(dtype)
    ratio_BT = torch.cat([random.to(dtype), edges_E[1:].expand(7, -1)], dim=1)
    mask_BT = torch.rand(ratio_BT.shape, generator=generator) < 0.7
    values_N1 = ratio_BT[mask_BT].clamp(max=2.0)[:, None]
    expected = ((values_N1 >= edges_E[:-1]) & (values_N1 < edges_E[1:])).sum(dim=0)
    assert torch.equal(ratio_histogram(ratio_BT, mask_BT), expected)
    assert expected.sum() == mask_BT.sum()


def test_the_edges_are_those_of_the_documents():
    assert tuple(-0.01 + 0.02 * i for i in range(102)) == RATIO_EDGES

"""The histogram of importance ratios for dashboards. Shapes: ``B`` completions, ``T`` completion tokens, ``E`` edges between bins."""

import torch


def _edges(device: torch.device | str) -> torch.Tensor:
    return -0.01 + 0.02 * torch.arange(102, dtype=torch.float64, device=device)


RATIO_EDGES = tuple(_edges("cpu").tolist())
"""Edges of the bins: -0.01, 0.01, ..., 2.01. A ratio of 1 lies in the middle of a bin; ratios above 2 are counted in the last bin."""


@torch.no_grad()
def ratio_histogram(ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """The number of ratios inside of the mask in each bin of :data:`RATIO_EDGES`: ``[E - 1]`` counts on the device of ``ratio_BT``.

    Nothing here waits for the device, as ``torch.histc`` and ``torch.bincount`` would.
    """
    edges_E = _edges(ratio_BT.device).to(ratio_BT.dtype)
    ratio_BT = torch.where(mask_BT.bool(), ratio_BT.clamp(max=2.0), torch.inf)
    # The bin of a ratio is the number of edges up to it: 0 is below all edges, E above all of them, where masked positions end up.
    bins_N = torch.bucketize(ratio_BT.flatten(), edges_E, right=True)
    counts = torch.zeros(len(RATIO_EDGES) + 1, dtype=torch.long, device=ratio_BT.device)
    return counts.index_add_(0, bins_N, torch.ones_like(bins_N))[1:-1]

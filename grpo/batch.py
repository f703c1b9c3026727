"""The records of a step, and the only place where masks are made.

Shapes: ``P`` problems, ``G`` completions each, ``B = P*G`` rows, ``T`` completion tokens, ``S`` prompt + completion tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

IGNORE_INDEX = -100
"""Label of positions that are not scored (PyTorch's ``cross_entropy`` default)."""


@dataclass(frozen=True)
class Problem:
    """One row of the dataset."""

    index: int
    """Its number in the dataset; the address of its randomness."""
    prompt: str | list[dict[str, str]]
    """As rewards see it: text, or chat messages."""
    prompt_ids: tuple[int, ...]
    """As the model sees it, after system prompt, few-shot examples and chat template."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Every other column of the row (``answer`` among them), handed to the rewards by name."""


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    ids: tuple[int, ...]
    """Tokens up to and including the first EOS, or cut at ``max_completion_length``; never empty."""
    text: str
    """Decoded without special tokens."""
    finished: bool
    """Whether it ended by itself (EOS or a stop string); ``False`` means it was cut (truncated)."""
    sampling_logprobs: tuple[float, ...] = ()
    """Log-probability of each token at the sampling temperature, as the sampler computed it; empty for greedy decoding."""


@dataclass(frozen=True)
class Group:
    """The G completions of one problem. A group never leaves its rank."""

    problem: Problem
    completions: tuple[Completion, ...]


def completion_mask(completion_ids_BT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Boolean ``[B, T]``: True at the first ``lengths_B[b]`` positions of row ``b``.

    By length, never by token value: a pad id equal to the EOS id, or several EOS ids, cannot confuse it.

    Raises:
        ValueError: if shapes disagree or a length is not in ``[0, T]``.
    """
    if completion_ids_BT.dim() != 2 or lengths_B.shape != completion_ids_BT.shape[:1]:
        raise ValueError(
            f"expected completion_ids [B, T] and lengths [B], got {tuple(completion_ids_BT.shape)} and {tuple(lengths_B.shape)}"
        )
    B, T = completion_ids_BT.shape
    if B and (int(lengths_B.min()) < 0 or int(lengths_B.max()) > T):
        raise ValueError(f"lengths must lie in [0, {T}], got {lengths_B.tolist()}")
    positions_T = torch.arange(T, device=completion_ids_BT.device)
    return positions_T[None, :] < lengths_B.to(completion_ids_BT.device)[:, None]


def right_pad(rows: Sequence[Sequence[int]], value: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Integer rows of uneven length to ``[B, longest]``, filled with ``value`` on the right."""
    width = max((len(row) for row in rows), default=0)
    padded = torch.full((len(rows), width), value, dtype=torch.long)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = torch.as_tensor(row, dtype=torch.long)
    return padded.to(device)

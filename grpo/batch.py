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


@dataclass(frozen=True)
class Batch:
    """Rows of tensors on the training device, right-padded: prompt, completion, padding.

    ``S`` and ``T`` are the longest sequence and completion among the rows.
    """

    sequence_ids_BS: torch.Tensor
    """Prompt, then completion, then padding."""
    prompt_lengths_B: torch.Tensor
    completion_mask_BT: torch.Tensor
    """True at each completion's tokens: what is scored."""
    loss_mask_BT: torch.Tensor
    """True at the tokens that are trained on: the same, less masked truncated completions."""
    advantages_B: torch.Tensor
    group_B: torch.Tensor
    """Number of the group of each row; rows of one group are neighbours and have the same prompt."""
    row_B: torch.Tensor
    """Number of each row in the whole batch of this rank, whatever part of it this is."""
    sampling_logprobs_BT: torch.Tensor
    """As the sampler computed them; a check on scoring, not used in the loss."""
    old_logprobs_BT: torch.Tensor | None = None
    """Under the policy that sampled; None: the policy of the first update is that policy."""
    ref_logprobs_BT: torch.Tensor | None = None
    """Under the reference; None: no KL term."""

    def __len__(self) -> int:
        return len(self.sequence_ids_BS)

    @property
    def lengths_B(self) -> torch.Tensor:
        """Tokens of prompt and completion together."""
        return self.prompt_lengths_B + self.completion_mask_BT.sum(dim=1)

    @property
    def to_score(self) -> tuple[torch.Tensor, ...]:
        """What a ``CompletionScorer`` takes."""
        return self.sequence_ids_BS, self.prompt_lengths_B, self.completion_mask_BT, self.group_B

    def rows(self, index: torch.Tensor | slice) -> "Batch":
        """Some of the rows, trimmed to the longest among them."""
        index = torch.arange(len(self))[index] if isinstance(index, slice) else index
        index = index.to(self.sequence_ids_BS.device)
        S = int(self.lengths_B[index].max())
        T = int(self.completion_mask_BT[index].sum(dim=1).max())
        chosen = {}
        for name, tensor in vars(self).items():
            if tensor is not None:
                width = {"S": S, "T": T}.get(name[-1])
                chosen[name] = tensor[index] if width is None else tensor[index, :width]
        return replace(self, **chosen)


def collate(
    groups: Sequence[Group],
    advantages_PG: torch.Tensor,
    *,
    pad_id: int,
    device: torch.device | str = "cpu",
    mask_truncated: bool = False,
) -> Batch:
    """Groups and their advantages ``[P, G]`` to one batch of ``P*G`` rows, group by group.

    Raises:
        ValueError: if there are not as many advantages as completions.
    """
    pairs = [(group.problem, completion) for group in groups for completion in group.completions]
    if advantages_PG.numel() != len(pairs):
        raise ValueError(f"{len(pairs)} completions, but {advantages_PG.numel()} advantages")
    lengths_B = torch.tensor([len(completion.ids) for _, completion in pairs])
    completion_ids_BT = right_pad([completion.ids for _, completion in pairs], pad_id)
    mask_BT = completion_mask(completion_ids_BT, lengths_B)
    trained_B = torch.tensor([completion.finished or not mask_truncated for _, completion in pairs])
    sampled_BT = torch.zeros(mask_BT.shape)
    for b, (_, completion) in enumerate(pairs):
        if completion.sampling_logprobs:
            sampled_BT[b, : len(completion.ids)] = torch.tensor(completion.sampling_logprobs)
    tensors = dict(
        sequence_ids_BS=right_pad([problem.prompt_ids + completion.ids for problem, completion in pairs], pad_id),
        prompt_lengths_B=torch.tensor([len(problem.prompt_ids) for problem, _ in pairs]),
        completion_mask_BT=mask_BT,
        loss_mask_BT=mask_BT & trained_B[:, None],
        advantages_B=advantages_PG.flatten().float(),
        group_B=torch.tensor([p for p, group in enumerate(groups) for _ in group.completions]),
        row_B=torch.arange(len(pairs)),
        sampling_logprobs_BT=sampled_BT,
    )
    return Batch(**{name: tensor.to(device) for name, tensor in tensors.items()})


def minibatches(batch: Batch, count: int) -> list[Batch]:
    """``count`` equal parts of consecutive groups; one optimizer update is made from each.

    Rank r holds the global groups r, r + world_size, ..., so the same part of every rank is the same part of the whole batch,
    whatever the world size.
    """
    assert len(batch) % count == 0, f"{len(batch)} rows do not split into {count} minibatches"
    n = len(batch) // count
    return [batch.rows(slice(m * n, (m + 1) * n)) for m in range(count)]


def cut(batch: Batch, tokens: int, *, packed: bool = False) -> list[torch.Tensor]:
    """Row numbers of forward passes of at most ``tokens`` tokens each.

    Packed, a pass takes whole groups (prompt once, then the completions), or parts of one that is too long. Padded, it takes rows of
    like length. A row longer than the budget comes alone. At least one part, so that every rank runs one synchronised backward.
    """
    return _cut_groups(batch, tokens) if packed else _cut_rows(batch, tokens)


def _cut_rows(batch: Batch, tokens: int) -> list[torch.Tensor]:
    lengths = batch.lengths_B.tolist()
    parts: list[list[int]] = [[]]
    for b in sorted(range(len(batch)), key=lambda b: lengths[b]):  # ascending, so that row b is the longest of its part
        if parts[-1] and (len(parts[-1]) + 1) * lengths[b] > tokens:
            parts.append([])
        parts[-1].append(b)
    return [torch.tensor(rows) for rows in parts]


def _cut_groups(batch: Batch, tokens: int) -> list[torch.Tensor]:
    prompts, lengths = batch.prompt_lengths_B.tolist(), batch.lengths_B.tolist()
    parts: list[list[int]] = [[]]
    used, group_before = 0, None
    for b, group in enumerate(batch.group_B.tolist()):
        cost = lengths[b] - prompts[b] + (prompts[b] if group != group_before else 0)
        if parts[-1] and used + cost > tokens:
            parts.append([])
            used, cost = 0, lengths[b]
        parts[-1].append(b)
        used, group_before = used + cost, group
    return [torch.tensor(rows) for rows in parts]


def microbatches(batch: Batch, tokens: int, *, packed: bool = False) -> Iterator[tuple[Batch, bool]]:
    """``(rows, is_last)`` for each part of :func:`cut`."""
    parts = cut(batch, tokens, packed=packed)
    for number, rows in enumerate(parts, 1):
        yield batch.rows(rows), number == len(parts)

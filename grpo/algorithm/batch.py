"""The records of a step, from a row of the dataset to a micro-batch.

    P   problems                          T   tokens of the longest completion
    G   completions of each problem       S   tokens of the longest prompt and completion
    B   rows, P*G of them                 M   minibatches of n rows

Masks are made here and nowhere else, and from lengths: a token's value never says whether it is
padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.types import Device

IGNORE_INDEX = -100
"""Label of positions that are not scored, as in PyTorch's ``cross_entropy``."""


@dataclass(frozen=True)
class Problem:
    """One row of the dataset."""

    index: int
    """Index of the row in the dataset; part of the sampling seed of its completions."""
    prompt: str | list[dict[str, str]]
    """The prompt of the row: text, or a list of chat messages."""
    prompt_ids: tuple[int, ...]
    """The prompt as the model gets it: with system prompt, few-shot examples and chat template."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row, among them ``answer``; rewards get them as keyword
    arguments."""
    reward_prompt: str | list[dict[str, str]] | None = None
    """The prompt as rewards get it; ``None``: as in the row. With a list of messages, completions
    are messages too."""

    @property
    def prompt_for_rewards(self) -> str | list[dict[str, str]]:
        """The prompt as rewards get it."""
        if self.reward_prompt is None:
            return self.prompt
        return self.reward_prompt


@dataclass(frozen=True)
class Completion:
    """One sampled response to a problem."""

    ids: tuple[int, ...]
    """Tokens up to and including the first EOS, at most ``max_completion_length`` of them, at least
    one."""
    text: str
    """The tokens decoded, with special tokens (in some models ``<think>`` is one), but without EOS,
    padding and stop tokens that are no tags."""
    finished: bool
    """True if the response ended with EOS or a stop string, False if it was truncated at
    ``max_completion_length``."""
    sampling_logprobs: tuple[float, ...] = ()
    """Log-probability of each token at the sampling temperature, as computed while sampling; empty
    if greedy."""
    logged: dict[str, Any] = field(default_factory=dict)
    """Column -> the value that a reward gave to ``log_extra`` for this completion."""
    loss_mask: tuple[bool, ...] = ()
    """True at each token that the model sampled, False at those of a tool or environment; empty:
    all were sampled."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that the model sampled."""
        if not self.loss_mask:
            return self.ids
        return tuple(compress(self.ids, self.loss_mask))

    @property
    def size(self) -> str:
        """``62 tokens``; of several turns ``62 tokens, 14 of them not the model's``."""
        size = f"{len(self.ids)} tokens"
        num_others = len(self.ids) - len(self.sampled_ids)
        if num_others == 0:
            return size
        return f"{size}, {num_others} of them not the model's"

    @property
    def transcript(self) -> str:
        """The text; of several turns all of them, each behind its role."""
        return self.text


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    error: str = ""
    """The text that the model saw, if the tool raised, its arguments were wrong, or there is no
    tool of that name."""

    @property
    def failed(self) -> bool:
        return bool(self.error)


@dataclass(frozen=True)
class MultiTurnCompletion(Completion):
    """A completion of several turns of the model, with the answers of tools or of an environment
    between them.

    Its ``ids`` are those of all turns and answers, and it ends with a sampled token.
    """

    messages: tuple[dict[str, Any], ...] = ()
    """The turns as chat messages: those of the model with ``tool_calls``, and the answers."""
    stop_reason: str = "stop"
    """``stop``: the last turn asks for nothing; ``length``: no room is left; ``environment``: it
    has ended; ``max_turns``; ``failed``: the environment has failed."""
    rewards: tuple[float, ...] = ()
    """The reward of each turn, from an environment that gives one."""
    calls: tuple[ToolCall, ...] = ()
    environment: int | None = None
    """The row of the rollout, whose environment lives until the next rollout; None without an
    environment."""
    environment_reward: float | None = None
    """The reward of the environment itself: its ``get_reward()``, or the sum of ``rewards``."""
    environment_failure: str | None = None
    """Reason of the environment's failure; empty if it works. None without an environment, or if it
    got no action."""
    num_turns: int = 1
    """Turns of the model."""

    @property
    def transcript(self) -> str:
        if not self.messages:
            return self.text
        lines = []
        for message in self.messages:
            role = message["role"]
            if message.get("name"):
                role += f" {message['name']}"
            thought = message.get("reasoning_content") or ""
            content = message.get("content") or ""
            lines.append(f"[{role}] {thought}{content}")
            # Calls that were written between tags are part of the content.
            if "<" not in content:
                for call in message.get("tool_calls", ()):
                    function = call["function"]
                    lines.append(f"[call] {function['name']}({function['arguments']})")
        return "\n".join(lines)


@dataclass(frozen=True)
class Group:
    """The G completions of one problem; all of them are on the same rank."""

    problem: Problem
    completions: tuple[Completion, ...]


def completion_mask(completion_ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Boolean ``[B, T]``: True at the first ``lengths_B[b]`` positions of row ``b``.

    The mask never depends on token values, so a pad id that equals the EOS id, or several EOS ids,
    make no difference. ValueError if shapes disagree or a length is not in ``[0, T]``.
    """
    shape = completion_ids_BT.shape
    T = shape[-1]
    is_outside_B = (lengths_B < 0) | (lengths_B > T)
    if len(shape) != 2 or lengths_B.shape != shape[:1] or is_outside_B.any():
        raise ValueError(
            f"expected completion_ids [B, T] and lengths [B] in [0, T], got {tuple(shape)} and {lengths_B.tolist()}"
        )
    device = completion_ids_BT.device
    positions_T = torch.arange(T, device=device)
    return positions_T[None, :] < lengths_B.to(device)[:, None]


def completion_lengths(mask_BT: Tensor) -> Tensor:
    """``[B]`` the number of tokens up to the last True of each row: a mask may have gaps, at the
    tokens of tools."""
    T = mask_BT.shape[1]
    ends_T = torch.arange(1, T + 1, device=mask_BT.device)
    return (mask_BT * ends_T).amax(dim=1)


def right_pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """A tensor ``[B, longest row]`` of rows of integers, padded with ``value`` on the right."""
    width = max(map(len, rows), default=0)
    padded = torch.full((len(rows), width), value, dtype=torch.long)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = torch.tensor(row, dtype=torch.long)
    return padded


@dataclass(frozen=True)
class Batch:
    """Rows of tensors on the training device. ``S`` and ``T``: longest sequence and longest
    completion of the rows."""

    sequence_ids_BS: Tensor
    """Prompt, then completion, then padding."""
    prompt_lengths_B: Tensor
    completion_mask_BT: Tensor
    """True at the tokens of each completion that the model sampled: those that are scored."""
    loss_mask_BT: Tensor
    """True at the tokens that are trained on: all scored ones, or those of completions that are not
    truncated."""
    advantages_B: Tensor
    group_B: Tensor
    """Index of each row's group on this rank. Rows of one group are neighbours and have the same
    prompt."""
    row_B: Tensor
    """Index of each row in this rank's batch of the step; a minibatch or micro-batch keeps it."""
    sampling_logprobs_BT: Tensor
    """Log-probs as computed while sampling, for the loss's corrections and to report their
    difference."""
    old_logprobs_BT: Tensor | None = None
    """Log-probs under the policy that sampled; None: the policy has not been updated since."""
    ref_logprobs_BT: Tensor | None = None
    """Log-probs under the reference model; None: there is no KL term."""
    policy_mask_BT: Tensor | None = None
    """True at the tokens that have a policy term; None: all that are trained on."""
    computed_B: Tensor | None = None
    """True at the rows that are scored and trained on; the others have advantage 0 and no
    influence. None: all rows."""

    def __len__(self) -> int:
        return len(self.sequence_ids_BS)

    @property
    def lengths_B(self) -> Tensor:
        """Number of tokens of prompt and completion together."""
        return self.prompt_lengths_B + completion_lengths(self.completion_mask_BT)

    @property
    def scorer_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of :class:`grpo.algorithm.logprobs.CompletionScorer`."""
        return (
            self.sequence_ids_BS,
            self.prompt_lengths_B,
            self.completion_mask_BT,
            self.group_B,
        )

    @property
    def counted_BT(self) -> Tensor:
        """True at the tokens that metrics count: all scored ones, or, with ``computed_B``, those of
        advantage not 0."""
        if self.computed_B is None:
            return self.completion_mask_BT
        has_advantage_B1 = self.advantages_B.ne(0)[:, None]
        return self.completion_mask_BT & has_advantage_B1

    def select(self, rows: Tensor | slice) -> "Batch":
        """The batch of these rows only, padded to the longest of them."""
        rows = torch.arange(len(self), device=self.group_B.device)[rows]
        S = int(self.lengths_B[rows].max())
        T = int(completion_lengths(self.completion_mask_BT[rows]).max())
        width = {"S": S, "T": T}
        selected = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                axis = name[-1]
                selected[name] = value[rows] if axis == "B" else value[rows, : width[axis]]
        return replace(self, **selected)


def collate(
    groups: Sequence[Group],
    advantages_PG: Tensor,
    *,
    pad_id: int,
    device: Device = "cpu",
    mask_truncated: bool = False,
) -> Batch:
    """Make one batch of ``P*G`` rows, group after group, with an advantage for each completion, or
    ValueError.

    ``pad_id`` fills up shorter rows. ``mask_truncated`` leaves truncated completions out of the
    loss.
    """
    completions = []
    sequences = []
    prompt_lengths = []
    group_numbers = []
    for number, group in enumerate(groups):
        prompt_ids = group.problem.prompt_ids
        for completion in group.completions:
            completions.append(completion)
            sequences.append(prompt_ids + completion.ids)
            prompt_lengths.append(len(prompt_ids))
            group_numbers.append(number)
    B = len(completions)
    if advantages_PG.numel() != B:
        raise ValueError(f"{B} completions, but {advantages_PG.numel()} advantages")

    # Positions of a row come from its length, never from the value of a token.
    T = max(len(completion.ids) for completion in completions)
    mask_BT = torch.zeros(B, T, dtype=torch.bool)
    trained_BT = torch.zeros(B, T, dtype=torch.bool)
    sampling_logprobs_BT = torch.zeros(B, T)
    for b, completion in enumerate(completions):
        row = slice(len(completion.ids))
        mask_BT[b, row] = torch.tensor(completion.loss_mask or True)
        if completion.finished or not mask_truncated:
            trained_BT[b] = mask_BT[b]
        if completion.sampling_logprobs:
            sampling_logprobs_BT[b, row] = torch.tensor(completion.sampling_logprobs)

    return Batch(
        sequence_ids_BS=right_pad(sequences, pad_id).to(device),
        prompt_lengths_B=torch.tensor(prompt_lengths, device=device),
        completion_mask_BT=mask_BT.to(device),
        loss_mask_BT=trained_BT.to(device),
        advantages_B=advantages_PG.flatten().float().to(device),
        group_B=torch.tensor(group_numbers, device=device),
        row_B=torch.arange(B, device=device),
        sampling_logprobs_BT=sampling_logprobs_BT.to(device),
    )


def minibatches(batch: Batch, count: int) -> list[Batch]:
    """``count`` equal parts of consecutive groups; each part is one optimizer update.

    Rank r has the groups r, r + world_size, ...: the m-th parts of all ranks are the same groups at
    every world size.
    """
    assert len(batch) % count == 0, f"{len(batch)} rows do not split into {count} minibatches"
    parts = torch.arange(len(batch)).chunk(count)
    return [batch.select(rows) for rows in parts]


def skip_zero_advantage(batch: Batch, num_minibatches: int = 1) -> Batch:
    """The batch with ``computed_B``: without the rows of advantage 0, which have no gradient if
    there is no KL term.

    Of a minibatch without any advantage, the shortest row is computed: DDP needs a backward pass of
    every rank.
    """
    computed_Mn = batch.advantages_B.ne(0).view(num_minibatches, -1)
    lengths_Mn = batch.lengths_B.view(num_minibatches, -1)
    for computed_n, lengths_n in zip(computed_Mn, lengths_Mn, strict=True):
        if not computed_n.any():
            computed_n[lengths_n.argmin()] = True
    return replace(batch, computed_B=computed_Mn.flatten())


def microbatches(
    batch: Batch,
    max_tokens: int,
    *,
    packed: bool = False,
    num_passes: int = 0,
) -> Iterator[tuple[Batch, bool]]:
    """Yield ``(micro-batch, is_last)`` for each part of :func:`microbatch_rows`.

    If there are fewer than ``num_passes``, the first ones have no effect.
    """
    parts = microbatch_rows(batch, max_tokens, packed=packed)
    for _ in range(num_passes - len(parts)):
        yield row_without_gradient(batch), False
    for number, rows in enumerate(parts, 1):
        micro = batch.select(rows)
        if micro.computed_B is not None:
            # No metric counts the rows of advantage 0.
            has_advantage_B1 = micro.advantages_B.ne(0)[:, None]
            micro = replace(micro, loss_mask_BT=micro.loss_mask_BT & has_advantage_B1)
        yield micro, number == len(parts)


def row_without_gradient(batch: Batch) -> Batch:
    """The shortest row of a batch as a micro-batch that no loss and no metric counts."""
    shortest = batch.lengths_B.argmin()
    row = batch.select(shortest[None])
    return replace(
        row,
        loss_mask_BT=torch.zeros_like(row.loss_mask_BT),
        advantages_B=torch.zeros_like(row.advantages_B),
        computed_B=torch.ones_like(row.group_B, dtype=torch.bool),
        row_B=row.row_B[:0],  # of no place in the batch: its log-probs are not stored as old ones
    )


KEYS_PER_TOKEN = 8
"""A packed backward pass stores the prompt's keys and values once per row: most of the memory of
short completions."""


def microbatch_rows(batch: Batch, max_tokens: int, *, packed: bool = False) -> list[Tensor]:
    """Row indices of each micro-batch, so that one forward pass computes at most ``max_tokens``
    tokens.

    With ``packed``, a micro-batch has consecutive rows and counts each prompt once per group; its
    rows together attend to at most :data:`KEYS_PER_TOKEN` times ``max_tokens`` prompt tokens.
    Otherwise rows are sorted by length, and padding counts. A longer row is a micro-batch of its
    own. Only rows of ``computed_B`` are in one.
    """
    prompts = batch.prompt_lengths_B.tolist()
    lengths = batch.lengths_B.tolist()
    groups = batch.group_B.tolist()
    rows = range(len(batch))
    if batch.computed_B is not None:
        rows = batch.computed_B.nonzero().flatten().tolist()
    if not packed:
        rows = sorted(rows, key=lengths.__getitem__)

    parts = []
    part = []
    used = 0  # tokens that a forward pass of the part computes
    keys = 0  # prompt tokens that its rows attend to
    for b in rows:
        if not packed:
            # Sorted by length: the rows before b are padded to its length.
            used = (len(part) + 1) * lengths[b]
        elif part and groups[part[-1]] == groups[b]:
            used += lengths[b] - prompts[b]
        else:
            used += lengths[b]
        keys += prompts[b]

        is_full = used > max_tokens or (packed and keys > KEYS_PER_TOKEN * max_tokens)
        if part and is_full:
            parts.append(torch.tensor(part))
            part = []
            used = lengths[b]  # the prompt is computed again in the new part
            keys = prompts[b]
        part.append(b)
    parts.append(torch.tensor(part))
    return parts

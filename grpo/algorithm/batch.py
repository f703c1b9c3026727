"""The records of a step, from a row of the dataset to a micro-batch. Masks are made here and nowhere else.

Shapes: ``P`` problems, ``G`` completions each, ``B = P*G`` rows, ``T`` completion tokens, ``S`` tokens with the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

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
    """The other columns of the row, among them ``answer``; rewards get them as keyword arguments."""
    reward_prompt: str | list[dict[str, str]] | None = None
    """The prompt as rewards get it; ``None``: as in the row. With a list of messages, completions are messages too."""

    @property
    def prompt_of_rewards(self) -> str | list[dict[str, str]]:
        """The prompt as rewards get it."""
        return self.prompt if self.reward_prompt is None else self.reward_prompt


class AllowedTokens(NamedTuple):
    """The tokens that top-k, top-p and min-p allowed at each position (``rollout.keep_sampling_mask``).

    Lists of token ids, one after the other: a mask of positions x vocabulary would be a thousand times larger.
    """

    ids_K: Tensor
    """int32: the ids allowed at the first position, then those at the second, ..., row after row."""
    counts: Tensor
    """int32 ``[T]`` of a completion, ``[B, T]`` of a batch: number of ids allowed at each position; 0: all tokens."""

    def select(self, rows: Tensor, T: int) -> "AllowedTokens":
        """The allowed tokens of some rows of a batch; ``counts`` becomes ``[rows, T]``."""
        ids_by_row = self.ids_K.split(self.counts.sum(dim=1).tolist())
        return AllowedTokens(torch.cat([ids_by_row[b] for b in rows.tolist()]), self.counts[rows, :T])

    def split(self, n: int) -> list["AllowedTokens"]:
        """The allowed tokens of each ``n`` positions in a row, where ``counts`` has one dimension."""
        counts = self.counts.split(n)
        ids = self.ids_K.split([int(counts_n.sum()) for counts_n in counts])
        return [AllowedTokens(*part) for part in zip(ids, counts, strict=True)]

    def to(self, device: Device) -> "AllowedTokens":
        return AllowedTokens(self.ids_K.to(device), self.counts.to(device))


@dataclass(frozen=True)
class Completion:
    """One sampled response to a problem."""

    ids: tuple[int, ...]
    """Tokens up to and including the first EOS, at most ``max_completion_length`` of them, at least one."""
    text: str
    """The tokens decoded, with special tokens (in some models ``<think>`` is one), but without EOS, padding and stop
    tokens that are no tags."""
    finished: bool
    """True if the response ended with EOS or a stop string, False if it was truncated at ``max_completion_length``."""
    sampling_logprobs: tuple[float, ...] = ()
    """Log-probability of each token at the sampling temperature, as computed while sampling; empty if greedy."""
    allowed: AllowedTokens | None = field(default=None, compare=False)
    """The tokens that could be drawn at each position, if ``rollout.keep_sampling_mask``; None: all."""
    logged: dict[str, Any] = field(default_factory=dict)
    """Column -> the value that a reward gave to ``log_extra`` for this completion."""
    loss_mask: tuple[bool, ...] = ()
    """True at each token that the model sampled, False at those of a tool or environment; empty: all were sampled."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that the model sampled."""
        return tuple(compress(self.ids, self.loss_mask)) if self.loss_mask else self.ids

    @property
    def size(self) -> str:
        """``62 tokens``; of several turns ``62 tokens, 14 of them not the model's``."""
        num_others = len(self.ids) - len(self.sampled_ids)
        return f"{len(self.ids)} tokens" + (f", {num_others} of them not the model's" if num_others else "")

    @property
    def transcript(self) -> str:
        """The text; of several turns all of them, each behind its role."""
        return self.text


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    seconds: float
    error: str = ""
    """The text that the model saw, if the tool raised, its arguments were wrong, or there is no tool of that name."""

    @property
    def failed(self) -> bool:
        return bool(self.error)


@dataclass(frozen=True)
class Turns(Completion):
    """A completion of several turns of the model, with the answers of tools or of an environment between them.

    Its ``ids`` are those of all turns and answers, and it ends with a sampled token.
    """

    messages: tuple[dict[str, Any], ...] = ()
    """The turns as chat messages: those of the model with ``tool_calls``, and the answers."""
    stop_reason: str = "stop"
    """``stop``: the last turn asks for nothing; ``length``: no room is left; ``environment``: it has ended;
    ``max_turns``; ``failed``: the environment has failed."""
    rewards: tuple[float, ...] = ()
    """The reward of each turn, from an environment that gives one."""
    calls: tuple[ToolCall, ...] = ()
    environment: Any = None
    """The place where the environment lives until the next rollout (:class:`grpo.rewards.calls.Place`)."""
    environment_name: str | None = None
    """The name of the environment's class; None without one."""
    environment_reward: float | None = None
    """The reward of the environment itself: its ``get_reward()``, or the sum of ``rewards``."""
    environment_failure: str | None = None
    """Reason of the environment's failure; empty if it works. None without an environment, or if it got no action."""
    num_turns: int = 1
    """Turns of the model."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Columns for the rewards, which a rollout function returned with this completion."""

    @property
    def transcript(self) -> str:
        lines = []
        for message in self.messages:
            name = f" {message['name']}" if message.get("name") else ""
            thought = message.get("reasoning_content") or ""
            lines.append(f"[{message['role']}{name}] {thought}{message.get('content') or ''}")
            # Calls that were written between tags are part of the content.
            calls = [
                f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())
            ]
            lines += [f"[call] {call}" for call in calls if "<" not in (message.get("content") or "")]
        return "\n".join(lines) if self.messages else self.text


@dataclass(frozen=True)
class Group:
    """The G completions of one problem; all of them are on the same rank."""

    problem: Problem
    completions: tuple[Completion, ...]


def completion_mask(completion_ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Boolean ``[B, T]``: True at the first ``lengths_B[b]`` positions of row ``b``.

    The mask never depends on token values, so a pad id that equals the EOS id, or several EOS ids, make no difference.
    ValueError if shapes disagree or a length is not in ``[0, T]``.
    """
    shape, T = completion_ids_BT.shape, completion_ids_BT.shape[-1]
    if len(shape) != 2 or lengths_B.shape != shape[:1] or bool(((lengths_B < 0) | (lengths_B > T)).any()):
        raise ValueError(
            f"expected completion_ids [B, T] and lengths [B] in [0, T], got {tuple(shape)} and {lengths_B.tolist()}"
        )
    positions_T = torch.arange(T, device=completion_ids_BT.device)
    return positions_T[None, :] < lengths_B.to(completion_ids_BT.device)[:, None]


def completion_lengths(mask_BT: Tensor) -> Tensor:
    """``[B]`` the number of tokens up to the last True of each row: a mask may have gaps, at the tokens of tools."""
    return (mask_BT * torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)).amax(dim=1)


def right_pad(rows: Sequence[Sequence[int]], value: int, device: Device = "cpu") -> Tensor:
    """A tensor ``[B, longest row]`` of rows of integers, padded with ``value`` on the right."""
    width = max((len(row) for row in rows), default=0)
    padded = torch.full((len(rows), width), value, dtype=torch.long)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = torch.as_tensor(row, dtype=torch.long)
    return padded.to(device)


@dataclass(frozen=True)
class Batch:
    """Rows of tensors on the training device. ``S`` and ``T``: longest sequence and longest completion of the rows."""

    sequence_ids_BS: Tensor
    """Prompt, then completion, then padding."""
    prompt_lengths_B: Tensor
    completion_mask_BT: Tensor
    """True at the tokens of each completion that the model sampled: those that are scored."""
    loss_mask_BT: Tensor
    """True at the tokens that are trained on: all scored ones, or those of completions that are not truncated."""
    advantages_B: Tensor
    group_B: Tensor
    """Index of each row's group on this rank. Rows of one group are neighbours and have the same prompt."""
    row_B: Tensor
    """Index of each row in this rank's batch of the step; a minibatch or micro-batch keeps it."""
    sampling_logprobs_BT: Tensor
    """Log-probs as computed while sampling, for the loss's corrections and to report their difference."""
    old_logprobs_BT: Tensor | None = None
    """Log-probs under the policy that sampled; None: the policy has not been updated since."""
    ref_logprobs_BT: Tensor | None = None
    """Log-probs under the reference model; None: there is no KL term."""
    allowed: AllowedTokens | None = None
    """The tokens that could be drawn at each position: log-probs are those of a softmax over these; None: all."""
    policy_mask_BT: Tensor | None = None
    """True at the tokens that have a policy term; None: all that are trained on."""
    computed_B: Tensor | None = None
    """True at the rows that are scored and trained on; the others have advantage 0 and no influence. None: all rows."""

    def __len__(self) -> int:
        return len(self.sequence_ids_BS)

    @property
    def lengths_B(self) -> Tensor:
        """Number of tokens of prompt and completion together."""
        return self.prompt_lengths_B + completion_lengths(self.completion_mask_BT)

    @property
    def scorer_inputs(self) -> tuple[Tensor | AllowedTokens, ...]:
        """The arguments of :class:`grpo.algorithm.logprobs.CompletionScorer`."""
        inputs = self.sequence_ids_BS, self.prompt_lengths_B, self.completion_mask_BT, self.group_B
        return inputs if self.allowed is None else (*inputs, self.allowed)

    @property
    def counted_BT(self) -> Tensor:
        """True at the tokens that metrics count: all scored ones, or, with ``computed_B``, those of advantage not 0."""
        if self.computed_B is None:
            return self.completion_mask_BT
        return self.completion_mask_BT & self.advantages_B.ne(0)[:, None]

    def select(self, rows: Tensor | slice) -> "Batch":
        """The batch of these rows only, padded to the longest of them."""
        rows = torch.arange(len(self))[rows] if isinstance(rows, slice) else rows
        rows = rows.to(self.sequence_ids_BS.device)
        S, T = int(self.lengths_B[rows].max()), int(completion_lengths(self.completion_mask_BT[rows]).max())
        columns = {"S": (rows, slice(S)), "T": (rows, slice(T)), "B": rows}  # by the last letter of a tensor's name
        tensors = {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}
        selected = {name: tensor[columns[name[-1]]] for name, tensor in tensors.items()}
        return replace(self, **selected, allowed=self.allowed and self.allowed.select(rows, T))


def collate(
    groups: Sequence[Group], advantages_PG: Tensor, *, pad_id: int, device: Device = "cpu", mask_truncated: bool = False
) -> Batch:
    """Make one batch of ``P*G`` rows, group after group, with an advantage for each completion, or ValueError.

    ``pad_id`` fills up shorter rows. ``mask_truncated`` leaves truncated completions out of the loss.
    """
    pairs = [(group.problem, completion) for group in groups for completion in group.completions]
    if advantages_PG.numel() != len(pairs):
        raise ValueError(f"{len(pairs)} completions, but {advantages_PG.numel()} advantages")
    lengths_B = torch.tensor([len(completion.ids) for _, completion in pairs])
    mask_BT = completion_mask(right_pad([completion.ids for _, completion in pairs], pad_id), lengths_B)
    for b, (_, completion) in enumerate(pairs):
        if completion.loss_mask:
            mask_BT[b, : len(completion.ids)] = torch.tensor(completion.loss_mask)
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
    allowed = None
    if recorded := {b: completion.allowed for b, (_, completion) in enumerate(pairs) if completion.allowed}:
        counts_BT = torch.zeros(mask_BT.shape, dtype=torch.int32)
        for b, tokens in recorded.items():
            counts_BT[b, : len(tokens.counts)] = tokens.counts
        allowed = AllowedTokens(torch.cat([tokens.ids_K for tokens in recorded.values()]), counts_BT).to(device)
    return Batch(**{name: tensor.to(device) for name, tensor in tensors.items()}, allowed=allowed)


def minibatches(batch: Batch, count: int) -> list[Batch]:
    """``count`` equal parts of consecutive groups; each part is one optimizer update.

    Rank r has the groups r, r + world_size, ...: the m-th parts of all ranks are the same groups at every world size.
    """
    assert len(batch) % count == 0, f"{len(batch)} rows do not split into {count} minibatches"
    n = len(batch) // count
    return [batch.select(slice(m * n, (m + 1) * n)) for m in range(count)]


def skip_zero_advantage(batch: Batch, num_minibatches: int = 1) -> Batch:
    """The batch with ``computed_B``: without the rows of advantage 0, which have no gradient if there is no KL term.

    Of a minibatch without any advantage, the shortest row is computed: DDP needs a backward pass of every rank.
    """
    has_advantage_Mn = batch.advantages_B.ne(0).view(num_minibatches, -1)
    shortest_M1 = batch.lengths_B.view(num_minibatches, -1).argmin(dim=1, keepdim=True)
    is_shortest_Mn = torch.arange(has_advantage_Mn.shape[1], device=shortest_M1.device) == shortest_M1
    computed_Mn = has_advantage_Mn | (is_shortest_Mn & ~has_advantage_Mn.any(dim=1, keepdim=True))
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
        yield without_effect(batch), False
    for number, rows in enumerate(parts, 1):
        micro = batch.select(rows)
        if micro.computed_B is not None:  # no metric counts the rows of advantage 0
            micro = replace(micro, loss_mask_BT=micro.loss_mask_BT & micro.advantages_B.ne(0)[:, None])
        yield micro, number == len(parts)


def without_effect(batch: Batch) -> Batch:
    """The shortest row of a batch as a micro-batch that no loss and no metric counts."""
    row = batch.select(batch.lengths_B.argmin()[None])
    return replace(
        row,
        loss_mask_BT=torch.zeros_like(row.loss_mask_BT),
        advantages_B=torch.zeros_like(row.advantages_B),
        computed_B=torch.ones_like(row.group_B, dtype=torch.bool),
        row_B=row.row_B[:0],  # of no place in the batch: its log-probs are not stored as old ones
    )


KEYS_PER_TOKEN = 8
"""A packed backward pass stores the prompt's keys and values once per row: most of the memory of short completions."""


def microbatch_rows(batch: Batch, max_tokens: int, *, packed: bool = False) -> list[Tensor]:
    """Row indices of each micro-batch, so that one forward pass computes at most ``max_tokens`` tokens.

    With ``packed``, a micro-batch has consecutive rows and counts each prompt once per group; its rows together attend
    to at most :data:`KEYS_PER_TOKEN` times ``max_tokens`` prompt tokens. Otherwise rows are sorted by length, and
    padding counts. A longer row is a micro-batch of its own. Only rows of ``computed_B`` are in one.
    """
    prompts, lengths, groups = batch.prompt_lengths_B.tolist(), batch.lengths_B.tolist(), batch.group_B.tolist()
    parts: list[list[int]] = [[]]
    used = keys = 0  # tokens of the last part; prompt tokens that its rows attend to
    rows = range(len(batch)) if batch.computed_B is None else batch.computed_B.nonzero().flatten().tolist()
    for b in rows if packed else sorted(rows, key=lengths.__getitem__):
        part = parts[-1]
        if not packed:  # sorted by length: the rows before b are padded to its length
            used = (len(part) + 1) * lengths[b]
        elif part and groups[part[-1]] == groups[b]:
            used += lengths[b] - prompts[b]
        else:
            used += lengths[b]
        keys += prompts[b]
        if part and (used > max_tokens or (packed and keys > KEYS_PER_TOKEN * max_tokens)):
            part, used, keys = [], lengths[b], prompts[b]  # the prompt is computed again in the new part
            parts.append(part)
        part.append(b)
    return [torch.tensor(rows) for rows in parts]

"""The records of a step, from a row of the dataset to a micro-batch.

    P   problems                          T   tokens of the longest completion
    G   completions of each problem       S   tokens of the longest row, prompt and completion
    B   rows, one per completion: P*G     M   minibatches of n rows

A mask entry m_bt is 1 if token t of completion b counts, else 0. Masks are made from lengths: the
id of a token never says whether the token is padding.
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

MAX_PROMPT_KEYS_PER_TOKEN = 8
"""Limit on the prompt tokens that the rows of a packed micro-batch attend to, per token of
``max_tokens``.

The backward pass stores a prompt's keys and values once per row. With short completions these keys
and values take most of the memory, but the number of computed tokens does not show this."""


@dataclass(frozen=True)
class Problem:
    """One row of the dataset."""

    index: int
    """Index of the row in the dataset. The sampling seeds of completions depend on this index."""
    prompt: str | list[dict[str, str]]
    """The prompt of the row: text, or a list of chat messages."""
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, with system prompt, few-shot examples and chat template."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row, such as ``answer``. Reward functions get these columns as
    keyword arguments."""
    reward_prompt: str | list[dict[str, str]] | None = None
    """Prompt that reward functions get. If the prompt is a list of messages, reward functions get
    completions as messages, too. Default: ``prompt``."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    error: str = ""
    """Error message that the model saw, if the tool raised, the arguments were wrong, or no tool
    has this name. Default: empty, because the call succeeded."""
    report: str = ""
    """The error for the user: with its type, and the line where the tool was called. Also a result
    without text, which is no error."""


@dataclass(frozen=True)
class Completion:
    """One sampled response to a problem.

    In a run with tools or an environment, turns of the model alternate with answers. ``ids`` then
    holds the tokens of all turns and answers, and ends with a sampled token. ``text`` is the text
    of the last turn.
    """

    ids: tuple[int, ...]
    """Token ids, including the EOS: at least one, at most ``max_completion_length``."""
    text: str
    """The decoded tokens. EOS, padding and stop tokens are left out. Stop tokens that are tags,
    such as ``</answer>``, and other special tokens stay: in some models ``<think>`` is one."""
    finished: bool
    """True if the response ended with EOS or a stop string, False if it was truncated at
    ``max_completion_length``."""
    sampling_logprobs: tuple[float, ...] = ()
    """Log-probability of each token at the sampling temperature, in nats, as computed while
    sampling. Empty after greedy decoding."""
    logged_columns: dict[str, Any] = field(default_factory=dict)
    """Values that reward functions logged with ``log_extra`` for this completion, by column
    name."""
    loss_mask: tuple[bool, ...] = ()
    """True at each token that the model sampled, False at each token of a tool or environment.
    Default: the model sampled all tokens."""

    # The rest is of completions with turns.
    messages: Sequence[dict[str, Any]] = ()
    """The turns of the model, and the replies of tools and environment, as chat messages. The
    message of a turn lists the calls of that turn in ``tool_calls``."""
    unread: Sequence[dict[str, Any]] = ()
    """Replies that left no room for another turn. Neither ``messages`` nor ``ids`` has them."""
    stop_reason: str = ""
    """Reason why the completion ended: ``stop`` (the last turn calls no tool), ``length`` (limit on
    tokens), ``max_turns`` (limit on turns), ``environment`` (the environment has ended) or
    ``failed`` (the environment has failed)."""
    rewards: Sequence[float | None] = ()
    """Reward of each turn. Empty if the environment gives no reward per turn."""
    calls: Sequence[ToolCall] = ()
    """Tool calls of all turns."""
    environment: int | None = None
    """Number of the completion's environment: the index of the completion in the rollout. The
    environment keeps its state until the next rollout. None if there is no environment."""
    environment_reward: float | None = None
    """Reward that the environment gave: its ``get_reward()``, or the sum of ``rewards``. None if
    the environment gave no reward."""
    environment_failure: str | None = None
    """Reason why the environment failed, empty if the environment worked. None if there is no
    environment, or if an environment with ``step()`` got no action."""
    num_turns: int = 1
    """Number of turns of the model."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that the model sampled."""
        if not self.loss_mask:
            return self.ids
        return tuple(compress(self.ids, self.loss_mask))

    @property
    def facts(self) -> str:
        """Size and ending, such as ``62 tokens, 14 of them not the model's, finished``."""
        num_not_sampled = len(self.ids) - len(self.sampled_ids)
        not_sampled = f", {num_not_sampled} of them not the model's" if num_not_sampled else ""
        ending = self.stop_reason or ("finished" if self.finished else "truncated")
        return f"{len(self.ids)} tokens{not_sampled}, {ending}"

    @property
    def transcript(self) -> str:
        """Text to show to a person. With several turns, each message is preceded by its role."""
        if not self.messages:
            return self.text

        lines = []
        for message in self.messages:
            role = message["role"]
            content = message["content"]
            if message.get("name"):
                role += f" {message['name']}"
            lines.append(f"[{role}] {content}")
            # Calls that the model wrote between tags are part of the content already.
            if "<" not in content:
                for call in message.get("tool_calls", ()):
                    function = call["function"]
                    lines.append(f"[call] {function['name']}({function['arguments']})")
        for message in self.unread:
            lines.append(f"[{message['role']}, not read: it did not fit] {message['content']:.500}")
        if self.environment_failure:
            lines.append(f"[environment failed] {self.environment_failure}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Group:
    """A problem and its G completions, all on the same rank."""

    problem: Problem
    completions: tuple[Completion, ...]


def completion_mask(completion_ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the boolean mask ``[B, T]`` of completions with the given lengths.

        m_bt = 1 if t < length_b, else 0

    Args:
        completion_ids_BT: ``[B, T]`` token ids. Only the shape is used.
        lengths_B: ``[B]`` number of tokens of each completion, including the EOS.

    Raises:
        ValueError: if shapes disagree or a length is not in ``[0, T]``.
    """
    shape = completion_ids_BT.shape
    T = shape[-1]
    is_outside_B = (lengths_B < 0) | (lengths_B > T)
    if len(shape) != 2 or lengths_B.shape != shape[:1] or is_outside_B.any():
        raise ValueError(
            "expected completion_ids [B, T] and lengths [B] in [0, T], "
            f"got {tuple(shape)} and {lengths_B.tolist()}"
        )
    # No token id is read: the pad id often equals an EOS id, and a mask of `ids != pad` would
    # then leave out the EOS, so that the model never learns to stop.
    device = completion_ids_BT.device
    positions_T = torch.arange(T, device=device)
    return positions_T[None, :] < lengths_B.to(device)[:, None]


def completion_lengths(mask_BT: Tensor) -> Tensor:
    """Return the lengths ``[B]``: the index of each row's last True plus 1, or 0 without a True."""
    # The sum of the mask would be too small, since the mask has gaps at the tokens of tools. So the
    # length is the greatest t + 1 at a token t of the mask.
    T = mask_BT.shape[1]
    ends_T = torch.arange(1, T + 1, device=mask_BT.device)
    return (mask_BT * ends_T).amax(dim=1)


def right_pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Return rows of integers as a tensor ``[B, longest row]``, padded with ``value``."""
    # Padding is on the right, because in a causal model later tokens do not influence earlier ones.
    # So neither an attention mask nor shifted positions are needed.
    width = max(map(len, rows), default=0)
    padded = torch.full((len(rows), width), value, dtype=torch.long)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = torch.tensor(row, dtype=torch.long)
    return padded


@dataclass(frozen=True)
class Batch:
    """Completions of a step, or a part of them, as tensors on the training device.

    S is the length of the longest row of this batch, prompt included. T is the length of the
    longest completion.
    """

    sequence_ids_BS: Tensor
    """Token ids: prompt, then completion, then padding."""
    prompt_lengths_B: Tensor
    """Number of tokens of each prompt."""
    completion_mask_BT: Tensor
    """True at the completion tokens that the model sampled. These tokens are scored."""
    loss_mask_BT: Tensor
    """True at the tokens that are trained on: the scored tokens, without truncated completions if
    ``mask_truncated`` was set."""
    advantages_B: Tensor
    """Advantage of each completion, without gradient."""
    group_B: Tensor
    """Index of each row's group on this rank. Rows of one group are neighbours and have the same
    prompt."""
    row_B: Tensor
    """Index of each row in this rank's full batch of the step. Rows of minibatches and
    micro-batches keep this index."""
    sampling_logprobs_BT: Tensor
    """Log-probs that the sampler computed. The loss uses them for its sampler correction, and
    metrics compare them with the log-probs of the scorer."""
    old_logprobs_BT: Tensor | None = None
    """Log-probs under the policy before its first update of the step, computed by the trainer; with
    ``dppo_tv`` the sampling log-probs. Default: the step has a single update, for which
    ``train_grpo.py`` takes the new log-probs, detached."""
    ref_logprobs_BT: Tensor | None = None
    """Log-probs under the reference model. Default: there is no reference model."""
    policy_mask_BT: Tensor | None = None
    """False at tokens whose loss has no policy term, but may have a KL term. Default: all tokens of
    ``loss_mask_BT`` have a policy term."""
    is_computed_B: Tensor | None = None
    """True at the rows that are scored and trained on. Other rows have advantage 0 and no gradient.
    Default: all rows."""

    def __len__(self) -> int:
        return len(self.sequence_ids_BS)

    @property
    def lengths_B(self) -> Tensor:
        """Number of tokens of each row, prompt and completion together."""
        return self.prompt_lengths_B + completion_lengths(self.completion_mask_BT)

    @property
    def scorer_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of :meth:`grpo.algorithm.logprobs.CompletionScorer.forward`."""
        return (
            self.sequence_ids_BS,
            self.prompt_lengths_B,
            self.completion_mask_BT,
            self.group_B,
        )

    @property
    def is_counted_BT(self) -> Tensor:
        """True at the scored tokens that metrics count. If ``is_computed_B`` is set, metrics do not
        count rows of advantage 0."""
        if self.is_computed_B is None:
            return self.completion_mask_BT
        # `is_computed_B` would count too much: each rank may compute a row of advantage 0, for its
        # backward pass alone. Metrics would then depend on the number of ranks.
        has_advantage_B1 = self.advantages_B.ne(0)[:, None]
        return self.completion_mask_BT & has_advantage_B1

    def select(self, rows: Tensor | slice) -> "Batch":
        """Return a batch of the given rows, padded to the longest of these rows."""
        # The indices go to the training device once, instead of once for each field.
        rows = torch.arange(len(self), device=self.group_B.device)[rows]
        S = self.lengths_B[rows].max()
        T = completion_lengths(self.completion_mask_BT[rows]).max()
        widths = {"S": int(S), "T": int(T)}

        selected = {}
        for name, tensor in vars(self).items():
            # The last letter of a field's name is the last axis of its tensor.
            axis = name[-1]
            if tensor is None:
                continue
            if axis == "B":
                selected[name] = tensor[rows]
            else:
                selected[name] = tensor[rows, : widths[axis]]
        return replace(self, **selected)


def collate(
    groups: Sequence[Group],
    advantages_PG: Tensor,
    *,
    pad_id: int,
    device: Device = "cpu",
    mask_truncated: bool = False,
) -> Batch:
    """Make one batch of ``P*G`` rows, group after group.

    Args:
        groups: the groups of this rank.
        advantages_PG: ``[P, G]`` advantage of each completion.
        pad_id: token id of the padding. The id may be that of an EOS.
        device: the training device.
        mask_truncated: leave truncated completions out of the loss (DAPO's overlong filtering).

    Raises:
        ValueError: if the number of advantages is not the number of completions.
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

    # Token t of a completion is in column t of every tensor [B, T], for prompts of every length.
    T = max(len(completion.ids) for completion in completions)
    mask_BT = torch.zeros(B, T, dtype=torch.bool)
    loss_mask_BT = torch.zeros(B, T, dtype=torch.bool)
    sampling_logprobs_BT = torch.zeros(B, T)
    for b, completion in enumerate(completions):
        columns = slice(len(completion.ids))
        # An empty mask stands for True at every token.
        mask_BT[b, columns] = torch.tensor(completion.loss_mask or True)
        # A truncated response may have been on its way to the right answer: a reward of 0 for it
        # is noise.
        if completion.finished or not mask_truncated:
            loss_mask_BT[b] = mask_BT[b]
        if completion.sampling_logprobs:
            sampling_logprobs_BT[b, columns] = torch.tensor(completion.sampling_logprobs)

    # Rows are filled on the CPU, and each tensor goes to the device in one copy.
    return Batch(
        sequence_ids_BS=right_pad(sequences, pad_id).to(device),
        prompt_lengths_B=torch.tensor(prompt_lengths, device=device),
        completion_mask_BT=mask_BT.to(device),
        loss_mask_BT=loss_mask_BT.to(device),
        advantages_B=advantages_PG.flatten().float().to(device),
        group_B=torch.tensor(group_numbers, device=device),
        row_B=torch.arange(B, device=device),
        sampling_logprobs_BT=sampling_logprobs_BT.to(device),
    )


def minibatches(batch: Batch, count: int) -> list[Batch]:
    """Divide a batch into ``count`` minibatches of equal size, one for each optimizer update."""
    # Each part has consecutive groups. Rank r has the groups r, r + world_size, ... of the step, so
    # the m-th parts of all ranks together are the same groups at every world size.
    assert len(batch) % count == 0, f"{len(batch)} rows do not split into {count} minibatches"
    parts = torch.arange(len(batch)).chunk(count)
    return [batch.select(rows) for rows in parts]


def skip_zero_advantage(batch: Batch, num_minibatches: int = 1) -> Batch:
    """Return the batch with ``is_computed_B`` set, so that rows of advantage 0 are not computed.

    Call it only if the loss has no KL term: then these rows have no gradient. They stay in the
    batch, and the denominator of the loss counts them. If all rows of a minibatch have advantage 0,
    its shortest row is computed all the same.
    """
    is_computed_Mn = batch.advantages_B.ne(0).view(num_minibatches, -1)
    lengths_Mn = batch.lengths_B.view(num_minibatches, -1)
    for is_computed_n, lengths_n in zip(is_computed_Mn, lengths_Mn, strict=True):
        # DDP needs a backward pass of every rank in every update. So at least one row is computed,
        # the shortest, because it is the cheapest.
        if not is_computed_n.any():
            is_computed_n[lengths_n.argmin()] = True
    return replace(batch, is_computed_B=is_computed_Mn.flatten())


def microbatches(
    batch: Batch,
    max_tokens: int,
    *,
    packed: bool = False,
    num_passes: int = 0,
) -> Iterator[tuple[Batch, bool]]:
    """Yield ``(micro-batch, is_last)``: the rows of a minibatch in parts that fit into memory.

    Args:
        batch: the rows of one optimizer update.
        max_tokens: argument of :func:`microbatch_rows`.
        packed: argument of :func:`microbatch_rows`.
        num_passes: least number of micro-batches. If the rows make fewer, micro-batches without
            effect come first. Default: no minimum.
    """
    parts = microbatch_rows(batch, max_tokens, packed=packed)
    # Under FSDP a pass is a collective of all ranks. A rank with fewer parts joins the passes of
    # other ranks with a row that has no effect.
    for _ in range(num_passes - len(parts)):
        yield row_without_gradient(batch), False
    for number, rows in enumerate(parts, 1):
        micro = batch.select(rows)
        if micro.is_computed_B is not None:
            # A row that is computed for its backward pass alone counts in no statistic of the loss.
            has_advantage_B1 = micro.advantages_B.ne(0)[:, None]
            micro = replace(micro, loss_mask_BT=micro.loss_mask_BT & has_advantage_B1)
        yield micro, number == len(parts)


def row_without_gradient(batch: Batch) -> Batch:
    """Return the shortest row as a micro-batch that neither loss nor metrics count."""
    shortest = batch.lengths_B.argmin()
    row = batch.select(shortest[None])
    return replace(
        row,
        loss_mask_BT=torch.zeros_like(row.loss_mask_BT),
        advantages_B=torch.zeros_like(row.advantages_B),
        # With `is_computed_B`, the advantage of 0 keeps the row out of all metrics.
        is_computed_B=torch.ones_like(row.group_B, dtype=torch.bool),
        # Without an index, log-probs of this row cannot be stored as old log-probs of the batch.
        row_B=row.row_B[:0],
    )


def microbatch_rows(batch: Batch, max_tokens: int, *, packed: bool) -> list[Tensor]:
    """Return the row indices of each micro-batch.

    Args:
        batch: the rows to divide. If ``is_computed_B`` is set, rows that are False there are left
            out.
        max_tokens: limit on the tokens that one forward pass computes. A longer row is alone in its
            micro-batch. Tokens with which all prompts begin count once per group, although a packed
            row has them once.
        packed: True if each prompt is computed once per group, without padding. Otherwise a prompt
            is computed once per row, and padding tokens count.
    """
    prompts = batch.prompt_lengths_B.tolist()
    lengths = batch.lengths_B.tolist()
    groups = batch.group_B.tolist()
    rows = range(len(batch))
    if batch.is_computed_B is not None:
        rows = batch.is_computed_B.nonzero().flatten().tolist()
    if not packed:
        # Rows of similar length need little padding. Packed rows stay in order instead, so that
        # rows of a group get into the same micro-batch, which computes their prompt once.
        rows = sorted(rows, key=lengths.__getitem__)

    max_prompt_keys = MAX_PROMPT_KEYS_PER_TOKEN * max_tokens
    parts = []
    part = []
    num_tokens = 0  # tokens that a forward pass of the part computes
    num_prompt_keys = 0  # prompt tokens that the rows of the part attend to
    for b in rows:
        if not packed:
            # All rows are padded to the longest row of the part, which is row b.
            num_tokens = (len(part) + 1) * lengths[b]
        elif part and groups[part[-1]] == groups[b]:
            num_tokens += lengths[b] - prompts[b]
        else:
            num_tokens += lengths[b]
        num_prompt_keys += prompts[b]

        is_full = num_tokens > max_tokens or (packed and num_prompt_keys > max_prompt_keys)
        if part and is_full:
            parts.append(torch.tensor(part))
            part = []
            num_tokens = lengths[b]  # prompt included: the new part computes the prompt again
            num_prompt_keys = prompts[b]
        part.append(b)
    parts.append(torch.tensor(part))
    return parts

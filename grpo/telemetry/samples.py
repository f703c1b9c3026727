"""Completions that a run writes to ``completions/``: a Parquet file per step, with rewards and
log-probs of tokens.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` kept rows, ``T``
completion tokens."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from torch import Tensor

from grpo.algorithm.batch import Completion, Group, MultiTurnCompletion
from grpo.system import write_atomically


def sample_records(
    groups: Sequence[Group],
    values_PGF: Tensor,
    rewards_PG: Tensor,
    advantages_PG: Tensor,
    *,
    names: Sequence[str],
    rows: Sequence[tuple[int, int]],
    step: int,
    logprobs_BT: Tensor,
    updated_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """``B`` completions of a step as records.

    Args: groups: ``answer`` of a record is the problem's column of that name; None where the
        problem has none. names: of the reward functions. rows: of each record the positions in
        ``P`` and ``G``. logprobs_BT: log-probs of each completion's tokens before the step: the old
        log-probs of the loss. updated_logprobs_BT: the same after the step's updates.
        ref_logprobs_BT: the same under the reference model; None without one. decode: turns token
        ids into text.
    """
    logprobs = {
        "logprobs": logprobs_BT,
        "updated_logprobs": updated_logprobs_BT,
        "ref_logprobs": ref_logprobs_BT,
    }
    records = []
    for b, (p, g) in enumerate(rows):
        problem = groups[p].problem
        completion = groups[p].completions[g]
        rewards = zip(names, values_PGF[p, g].tolist(), strict=True)
        record = {
            "step": step,
            "problem": problem.index,
            "prompt": _text(problem.prompt),
            "answer": _text(problem.columns.get("answer")),
            "completion": _text(completion.transcript),
            "rewards": dict(rewards),
            "reward": rewards_PG[p, g].item(),
            "advantage": advantages_PG[p, g].item(),
            "length": len(completion.ids),
            "finished": completion.finished,
            "token_ids": list(completion.ids),
            "tokens": [decode([token]) for token in completion.ids],
            "logged": _text(completion.logged),
        }
        for name, values_BT in logprobs.items():
            record[name] = None if values_BT is None else _of_sampled(values_BT[b], completion)
        if isinstance(completion, MultiTurnCompletion):
            # None where the model wrote all tokens, as in a run without turns.
            record["sampled"] = list(completion.loss_mask) or None
            record["messages"] = _text(completion.messages)
            record["stop_reason"] = completion.stop_reason
        records.append(record)
    return records


def _text(value: Any) -> str | None:
    """A value as text, lists and mappings as JSON; ``?`` in place of broken Unicode, which Parquet
    cannot hold."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")


def _of_sampled(values_T: Tensor, completion: Completion) -> list[float | None]:
    """The values of the tokens that the model sampled, None at those that a tool or environment
    wrote."""
    values = values_T[: len(completion.ids)].tolist()
    for t, is_sampled in enumerate(completion.loss_mask):
        if not is_sampled:
            values[t] = None
    return values


def write_samples(path: str | Path, records: Sequence[dict[str, Any]]) -> None:
    """Write one row per record."""
    table = pyarrow.Table.from_pylist(records)
    write_atomically(
        path, lambda temporary: pyarrow.parquet.write_table(table, temporary, compression="zstd")
    )


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """The records that :func:`write_samples` wrote."""
    return pyarrow.parquet.read_table(path).to_pylist()

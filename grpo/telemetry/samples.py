"""Completions that a run writes to ``completions/``, one Parquet file per step, with their rewards
and the log-probs of their tokens.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` completions that are
written, ``T`` completion tokens.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from torch import Tensor

from grpo.algorithm.batch import Completion, Group
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
    """Return records of ``B`` completions of a step, one record per row of the Parquet file.

    Args:
        groups: problems and completions of the step on this rank. A record has the column
            ``answer`` of its problem, or None.
        values_PGF: ``[P, G, F]`` values of the reward functions.
        rewards_PG: ``[P, G]`` rewards, the weighted sums of the values.
        advantages_PG: ``[P, G]`` advantages.
        names: names of the reward functions.
        rows: indices ``(p, g)`` of the ``B`` completions in ``groups``.
        step: number of the step.
        logprobs_BT: ``[B, T]`` log-probs in nats before the step, the old log-probs of the loss.
        updated_logprobs_BT: ``[B, T]`` log-probs after the updates of the step.
        ref_logprobs_BT: ``[B, T]`` log-probs under the reference model; None without a reference.
        decode: function that turns token ids into text.
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
            # Tokens are decoded one by one, since the report colours each token.
            "tokens": [decode([token]) for token in completion.ids],
            "logged": _text(completion.logged_columns),
        }
        for name, values_BT in logprobs.items():
            record[name] = None
            if values_BT is not None:
                record[name] = _at_sampled_tokens(values_BT[b], completion)
        if completion.messages:
            # The mask is empty, and the column None, if the model sampled all tokens.
            record["sampled"] = list(completion.loss_mask) or None
            record["messages"] = _text(completion.messages)
            record["stop_reason"] = completion.stop_reason
        records.append(record)
    return records


def _text(value: Any) -> str | None:
    """Return a value as text: a string as it is, another value as JSON. None stays None."""
    if value is None:
        return None
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    # Half of a surrogate pair has no UTF-8, which Parquet needs: it becomes a question mark.
    return value.encode("utf-8", "replace").decode()


def _at_sampled_tokens(values_T: Tensor, completion: Completion) -> list[float | None]:
    """Return the values ``[T]`` as a list without the padding. Tokens that a tool or environment
    wrote get None, since the policy did not sample them."""
    values = values_T[: len(completion.ids)].tolist()
    for t, is_sampled in enumerate(completion.loss_mask):
        if not is_sampled:
            values[t] = None
    return values


def write_samples(path: str | Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a Parquet file with one row per record."""
    table = pyarrow.Table.from_pylist(records)
    # The report may read the folder while the run writes.
    write_atomically(
        path,
        lambda file: pyarrow.parquet.write_table(table, file, compression="zstd"),
    )


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """Return the records that :func:`write_samples` wrote."""
    return pyarrow.parquet.read_table(path).to_pylist()

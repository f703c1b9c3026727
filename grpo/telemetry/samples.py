"""The completions that a run keeps: records with every reward and with each token's log-probs, one Parquet file a step.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` kept rows, ``T`` completion tokens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from grpo.batch import Group

_COLUMNS = {
    "step": pyarrow.int64(),
    "problem": pyarrow.int64(),
    "prompt": pyarrow.string(),
    "completion": pyarrow.string(),
    "reward": pyarrow.float64(),
    "advantage": pyarrow.float64(),
    "length": pyarrow.int64(),
    "finished": pyarrow.bool_(),
    "token_ids": pyarrow.list_(pyarrow.int64()),
    "tokens": pyarrow.list_(pyarrow.string()),
    "logprobs": pyarrow.list_(pyarrow.float32()),
    "updated_logprobs": pyarrow.list_(pyarrow.float32()),
    "ref_logprobs": pyarrow.list_(pyarrow.float32()),
}
REWARD = "rewards/"
"""Before the name of a reward function in its column."""


def sample_records(
    groups: Sequence[Group],
    values_PGF: torch.Tensor,
    rewards_PG: torch.Tensor,
    advantages_PG: torch.Tensor,
    *,
    names: Sequence[str],
    step: int,
    logprobs_BT: torch.Tensor,
    updated_logprobs_BT: torch.Tensor,
    ref_logprobs_BT: torch.Tensor | None,
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """The first ``B`` completions as records.

    Args:
        logprobs_BT: of each completion's tokens under the policy that sampled them, as the loss has them.
        updated_logprobs_BT: of the same tokens after the step's updates. ``exp(updated - logprobs)`` is the ratio by which the
            step changed a token's probability.
        ref_logprobs_BT: under the reference; None without one.
        decode: token ids to text.
    """
    rows = [(p, g) for p, group in enumerate(groups) for g in range(len(group.completions))][: len(logprobs_BT)]
    records = []
    for b, (p, g) in enumerate(rows):
        completion = groups[p].completions[g]
        n = len(completion.ids)
        records.append(
            {
                "step": step,
                "problem": groups[p].problem.index,
                "prompt": groups[p].problem.prompt,
                "completion": completion.text,
                "rewards": dict(zip(names, values_PGF[p, g].tolist(), strict=True)),
                "reward": rewards_PG[p, g].item(),
                "advantage": advantages_PG[p, g].item(),
                "length": n,
                "finished": completion.finished,
                "token_ids": list(completion.ids),
                "tokens": [decode([token]) for token in completion.ids],
                "logprobs": logprobs_BT[b, :n].tolist(),
                "updated_logprobs": updated_logprobs_BT[b, :n].tolist(),
                "ref_logprobs": None if ref_logprobs_BT is None else ref_logprobs_BT[b, :n].tolist(),
            }
        )
    return records


def write_samples(path: str | Path, records: Sequence[dict[str, Any]]) -> None:
    """One row a record, written beside and renamed: whoever reads while the run goes on finds a whole file or none.

    Chat prompts are stored as JSON. What could not be scored (NaN) is null.
    """
    names = list(records[0]["rewards"])
    columns = {name: [_storable(record.get(name)) for record in records] for name in _COLUMNS}
    schema = list(_COLUMNS.items())
    for name in names:
        columns[REWARD + name] = [_storable(record["rewards"][name]) for record in records]
        schema.append((REWARD + name, pyarrow.float64()))
    table = pyarrow.table(columns, schema=pyarrow.schema(schema))
    temporary = Path(path).with_suffix(".tmp")
    pyarrow.parquet.write_table(table, temporary, compression="zstd")
    os.replace(temporary, path)


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """The records of :func:`write_samples`; None where they had NaN.

    Raises:
        OSError, ValueError: if the file is damaged (pyarrow's errors are both).
    """
    records = []
    for row in pyarrow.parquet.read_table(path).to_pylist():
        record = {name: value for name, value in row.items() if not name.startswith(REWARD)}
        record["rewards"] = {name.removeprefix(REWARD): row[name] for name in row if name.startswith(REWARD)}
        records.append(record)
    return records


def _storable(value: Any) -> Any:
    """Text that UTF-8 can hold, numbers that are numbers, messages as JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_storable(item) for item in value]
    return value

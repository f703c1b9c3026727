"""The completions that a run keeps in ``completions/``: one Parquet file per step, with all rewards and each token's log-probs.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` kept rows, ``T`` completion tokens.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from grpo.batch import Group
from grpo.system import write_atomically

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
REWARD_PREFIX = "rewards/"
"""The column of a reward function is this prefix and the function's name."""


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
    """The first ``B`` completions of a step as records.

    Args:
        names: of the reward functions.
        logprobs_BT: log-probs of each completion's tokens before the step: the old log-probs of the loss.
        updated_logprobs_BT: the same after the step's updates. ``exp(updated - logprobs)`` is the factor by which the step changed a
            token's probability.
        ref_logprobs_BT: the same under the reference model; None without one.
        decode: turns token ids into text.
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
    """Write one row per record; a reader finds the complete file or none.

    Chat prompts are stored as JSON, NaN (a reward that could not score) as null.
    """
    names = list(records[0]["rewards"])
    columns = {name: [_storable(record.get(name)) for record in records] for name in _COLUMNS}
    schema = list(_COLUMNS.items())
    for name in names:
        columns[REWARD_PREFIX + name] = [_storable(record["rewards"][name]) for record in records]
        schema.append((REWARD_PREFIX + name, pyarrow.float64()))
    table = pyarrow.table(columns, schema=pyarrow.schema(schema))
    write_atomically(path, lambda temporary: pyarrow.parquet.write_table(table, temporary, compression="zstd"))


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """The records that :func:`write_samples` wrote; None where they had NaN.

    Raises:
        OSError, ValueError: if the file is damaged. (pyarrow's errors inherit from one of the two.)
    """
    records = []
    for row in pyarrow.parquet.read_table(path).to_pylist():
        record = {name: value for name, value in row.items() if not name.startswith(REWARD_PREFIX)}
        record["rewards"] = {
            name.removeprefix(REWARD_PREFIX): row[name] for name in row if name.startswith(REWARD_PREFIX)
        }
        records.append(record)
    return records


def _storable(value: Any) -> Any:
    """A value that Parquet can store: text without broken Unicode, None for NaN and infinity, chat messages as JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_storable(item) for item in value]
    return value

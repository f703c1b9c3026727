"""Completions that a run writes to ``completions/``: a Parquet file per step, with rewards and log-probs of tokens.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` kept rows, ``T`` completion tokens.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from torch import Tensor

from grpo.algorithm.batch import Completion, Group, Turns
from grpo.system import write_atomically
from grpo.telemetry.records import LOGGED_PREFIX

_INT, _FLOAT, _TEXT = pyarrow.int64(), pyarrow.float64(), pyarrow.string()
_LOGPROBS = pyarrow.list_(pyarrow.float32())
_COLUMNS = dict(
    step=_INT, problem=_INT, prompt=_TEXT, answer=_TEXT, completion=_TEXT, reward=_FLOAT, advantage=_FLOAT,
    length=_INT, finished=pyarrow.bool_(), token_ids=pyarrow.list_(_INT), tokens=pyarrow.list_(_TEXT),
    logprobs=_LOGPROBS, updated_logprobs=_LOGPROBS, ref_logprobs=_LOGPROBS,
    sampled=pyarrow.list_(pyarrow.bool_()), messages=_TEXT, stop_reason=_TEXT,
)  # fmt: skip
_OF_TURNS = ("sampled", "messages", "stop_reason")
"""Columns of runs with turns alone."""
REWARD_PREFIX = "rewards/"
"""Before the name of a reward function."""


def sample_records(
    groups: Sequence[Group], values_PGF: Tensor, rewards_PG: Tensor, advantages_PG: Tensor, *, names: Sequence[str],
    rows: Sequence[tuple[int, int]], step: int, logprobs_BT: Tensor, updated_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None, decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:  # fmt: skip
    """``B`` completions of a step as records.

    Args:
        groups: ``answer`` of a record is the problem's column of that name as text, a list or mapping
            as JSON; None where the problem has none.
        names: of the reward functions.
        rows: of each record the positions in ``P`` and ``G``.
        logprobs_BT: log-probs of each completion's tokens before the step: the old log-probs of the loss.
        updated_logprobs_BT: the same after the step's updates.
        ref_logprobs_BT: the same under the reference model; None without one.
        decode: turns token ids into text.
    """
    records = []
    for b, (p, g) in enumerate(rows):
        completion, answer = groups[p].completions[g], groups[p].problem.columns.get("answer")
        n = len(completion.ids)
        records.append({
            "step": step,
            "problem": groups[p].problem.index,
            "prompt": groups[p].problem.prompt,
            "answer": _answer_text(answer),
            "completion": completion.transcript,
            "rewards": dict(zip(names, values_PGF[p, g].tolist(), strict=True)),
            "reward": rewards_PG[p, g].item(),
            "advantage": advantages_PG[p, g].item(),
            "length": n,
            "finished": completion.finished,
            "token_ids": list(completion.ids),
            "tokens": [decode([token]) for token in completion.ids],
            "logprobs": _of_sampled(logprobs_BT[b, :n], completion),
            "updated_logprobs": _of_sampled(updated_logprobs_BT[b, :n], completion),
            "ref_logprobs": None if ref_logprobs_BT is None else _of_sampled(ref_logprobs_BT[b, :n], completion),
            "logged": completion.logged,
        })  # fmt: skip
        if isinstance(completion, Turns):  # sampled is False where a tool or environment wrote the token
            records[-1] |= {"sampled": list(completion.loss_mask) or None, "messages": list(completion.messages)}
            records[-1]["stop_reason"] = completion.stop_reason
    return records


def _answer_text(answer: Any) -> str | None:
    """A reference answer as text: lists and mappings as JSON."""
    if isinstance(answer, list | tuple | dict):
        return json.dumps(answer, ensure_ascii=False, default=str)
    return None if answer is None else str(answer)


def _of_sampled(values_T: Tensor, completion: Completion) -> list[float | None]:
    """The values of the tokens that the model sampled, None at the others."""
    mask = completion.loss_mask or [True] * len(values_T)
    return [value if is_sampled else None for value, is_sampled in zip(values_T.tolist(), mask, strict=True)]


def write_samples(path: str | Path, records: Sequence[dict[str, Any]]) -> None:
    """Write one row per record; chat prompts as JSON."""
    columns = {
        name: pyarrow.array([_storable(record.get(name)) for record in records], type=kind)
        for name, kind in _COLUMNS.items()
        if name not in _OF_TURNS or any(record.get(name) for record in records)
    }
    for name in records[0]["rewards"]:
        columns[REWARD_PREFIX + name] = pyarrow.array([record["rewards"][name] for record in records], type=_FLOAT)
    for name in dict.fromkeys(name for record in records for name in record.get("logged", ())):
        values = [_storable(record["logged"].get(name)) for record in records]
        if not {type(value) for value in values} <= {int, float, type(None)}:
            values = [None if value is None else str(value) for value in values]  # a column has one type
        columns[LOGGED_PREFIX + name] = pyarrow.array(values)
    table = pyarrow.table(columns)
    write_atomically(path, lambda temporary: pyarrow.parquet.write_table(table, temporary, compression="zstd"))


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """The records that :func:`write_samples` wrote."""
    records = pyarrow.parquet.read_table(path).to_pylist()
    for record in records:
        for field, prefix in (("rewards", REWARD_PREFIX), ("logged", LOGGED_PREFIX)):
            names = [name for name in record if name.startswith(prefix)]
            record[field] = {name.removeprefix(prefix): record.pop(name) for name in names}
    return records


def _storable(value: Any) -> Any:
    """A value that Parquet can store: chat messages as JSON, and text without broken Unicode."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return [_storable(item) for item in value] if isinstance(value, list) else value

"""The rows of one split, checked: prompts, reference answers, and the other columns for the rewards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import regex

from grpo.data.chat import Prompt
from grpo.data.rows import BUILTIN_PREFIX, GYM_PREFIX, dataset_setting, read_rows
from grpo.data.tasks import GYM_INSTRUCTIONS, load_task

if TYPE_CHECKING:  # the tiny model and the tasks are used without pydantic
    from grpo.config import DataConfig

PATTERN_SECONDS = 5.0
"""Time limit of ``answer_pattern`` on one row. ``re`` has none, and a pattern can backtrack for years."""


TEXT_OF_MESSAGES = regex.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']\s*:""")
"""Matches the beginning of chat messages that were written as JSON, or as Python prints them, into one text."""


@dataclass(frozen=True)
class Rows:
    """The checked rows of one split, before tokenization."""

    source: str
    """The setting that names the dataset (``data.dataset=...``), for messages."""
    prompts: list[Prompt]
    columns: list[dict[str, Any]]
    """The other columns of each row, for the rewards."""
    instructions: str | None = None
    """The system prompt of a task, if the configuration sets none. The tiny model, trained without one, gets none."""
    num_without_answer: int = 0
    places: Sequence[str] = ()
    """The place of each row in its file (``line 7``), or its number in the split."""
    empty_cells: Mapping[str, int] = field(default_factory=dict)
    """The number of rows without a value, by column, of the columns that lack some."""
    lacks_prompts: bool = False
    """True if there is no column of prompts, and the environments make them."""

    def place_of(self, index: int) -> str:
        """The place of a row, for messages: ``data.dataset=FILE, line 7``."""
        return f"{self.source}, {self.places[index]}" if self.places else self.source


def fingerprint(rows: Rows) -> str:
    """SHA-256 of all prompts and columns in order, which tells two files of the same name apart."""
    digest = hashlib.sha256()
    for row in zip(rows.prompts, rows.columns, strict=True):
        # A value that JSON cannot represent (an image) is replaced by the name of its type.
        text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(text.encode())
    return digest.hexdigest()


def load_rows(
    config: DataConfig,
    *,
    train: bool,
    seed: int,
    table: list[dict[str, Any]] | None = None,
    has_environment: bool = False,
) -> Rows | None:
    """Read and check the rows of the training or the evaluation split; None if no evaluation split is configured.

    Args:
        table: rows of a Python program, in place of those that the configuration names.
        has_environment: True if an environment may make the prompts, so that rows may lack the column `prompt`.
    """
    limit = config.max_train_samples if train else config.max_eval_samples
    rows = read_rows(config, train=train, seed=seed) if table is None else table[:limit]
    if rows is None:
        return None
    key, dataset = dataset_setting(config, train)
    source = f"data.{key}={dataset}"
    if not rows:
        raise ValueError(f"{source} has no rows")
    places = []
    for number, row in enumerate(rows, 1):
        places.append(getattr(row, "place", f"row {number} of the split"))

    # A column that the user has named must be there.
    lacks_prompts = has_environment and config.prompt_column == "prompt" and "prompt" not in rows[0]
    if not lacks_prompts:
        _check_column(rows, "prompt_column", config.prompt_column, source)
    prompts = []
    for place, row in zip(places, rows, strict=True):
        prompts.append(_checked_prompt(value_of(row, config.prompt_column), f"{source}, {place}"))

    columns = []
    empty_cells: Counter[str] = Counter()
    for row in rows:
        columns.append({name: value for name, value in row.items() if name != config.prompt_column})
        empty_cells.update(name for name, value in row.items() if _is_missing(value))

    num_without_answer = 0
    is_gym = dataset.startswith(GYM_PREFIX)
    is_task = is_gym or dataset.startswith(BUILTIN_PREFIX)
    answer_column = config.answer_column or ("answer" if is_task else None)
    if answer_column is not None:
        answers = _read_answers(config, rows, answer_column, places, source)
        for row, answer in zip(columns, answers, strict=True):
            row["answer"] = answer
        # A task of reasoning-gym with many right answers names none: its scorer reads the metadata.
        num_without_answer = 0 if is_gym else sum(map(_is_missing, answers))
        if num_without_answer == len(rows):
            raise ValueError(
                f"data.answer_column={answer_column} of {source}: {_why_empty(config, rows, answer_column)}"
            )
    elif config.answer_pattern is not None:
        raise ValueError("data.answer_pattern needs data.answer_column, the column to search for the pattern")
    return Rows(
        source,
        prompts,
        columns,
        instructions_of(config, dataset),
        num_without_answer,
        places,
        empty_cells,
        lacks_prompts,
    )


def instructions_of(config: DataConfig, dataset: str) -> str | None:
    """:attr:`Rows.instructions` for the rows of ``dataset``."""
    if config.system_prompt is not None:
        return None
    if dataset.startswith(GYM_PREFIX):
        return GYM_INSTRUCTIONS
    if dataset.startswith(BUILTIN_PREFIX):
        return load_task(dataset.removeprefix(BUILTIN_PREFIX)).instructions
    return None


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field inside one (``reward_model.ground_truth``); None where there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _check_column(rows: Sequence[Mapping[str, Any]], key: str, name: str, source: str) -> None:
    """``ValueError`` unless the rows have the column or the field ``name``, which ``data.KEY`` names."""
    if name in rows[0] or any(value_of(row, name) is not None for row in rows):
        return
    column, dot, field_name = name.partition(".")
    if not dot or column not in rows[0]:
        raise ValueError(f"data.{key}={name}: {source} has no such column; it has {', '.join(rows[0])}")
    value = rows[0][column]
    found = f"a mapping of {', '.join(value)}" if isinstance(value, Mapping) else type(value).__name__
    raise ValueError(f"data.{key}={name}: column {column} of {source} has no {field_name}; it holds {found}")


def _checked_prompt(prompt: Any, location: str) -> Prompt:
    """The prompt, or "" without any text: such a row is left out later, so that the others keep their index."""
    if prompt is None or isinstance(prompt, str):
        text = prompt or ""
        if TEXT_OF_MESSAGES.match(text):
            raise ValueError(
                f"{location}: the prompt is the text of a list of messages, {text:.60}: store it as a list, in a "
                ".jsonl or .parquet file for example"
            )
        return text if text.strip() else ""
    if not isinstance(prompt, list | tuple) or not prompt:
        expected = "a prompt is text, or a list of {role, content} messages that ends with the user's"
        raise ValueError(f"{location}: {expected}, not {prompt!r:.80}")
    messages = []
    for number, message in enumerate(prompt, 1):
        messages.append(_checked_message(message, f"{location}: message {number} of the prompt"))
    last_role = messages[-1]["role"]
    if last_role in ("system", "assistant"):
        raise ValueError(f"{location}: a prompt ends with the user's message, not with one of the role {last_role}")
    return messages


def _checked_message(message: Any, location: str) -> dict[str, Any]:
    """A chat message with every key that has a value: templates read ``tool_calls``, ``name`` and others."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{location} is {message!r:.80}, not a mapping with role and content")
    kept = _without_none(message)
    for call in kept.get("tool_calls", ()):
        _read_arguments(call.get("function", call))
    # A turn that only calls tools has no text, and many templates cannot add None to a text.
    content = kept.get("content", "" if "tool_calls" in kept else None)
    if not isinstance(content, str):
        found = "is missing" if content is None else f"is of type {type(content).__name__}"
        raise ValueError(f"{location}: the content of the {message['role']}'s message must be text, and {found}")
    return {**kept, "content": content}


def _read_arguments(function: dict[str, Any]) -> None:
    """Read a call's arguments that are JSON text, as OpenAI writes them: templates write what they get as JSON."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # what is no JSON stays as it is
            function["arguments"] = json.loads(arguments)


def _without_none(value: Any) -> Any:
    """A copy without keys whose value is None: in Arrow, every message of a column has the keys of all of them."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def _is_missing(value: Any) -> bool:
    """True for None, NaN, blank text and an empty list."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list | tuple):
        return not value
    return value is None


def _read_answers(
    config: DataConfig,
    rows: Sequence[Mapping[str, Any]],
    column: str,
    places: Sequence[str],
    source: str,
) -> list[Any]:
    """The reference answer of each row as it stands, or what ``answer_pattern`` finds in it."""
    _check_column(rows, "answer_column", column, source)
    answers = []
    for row in rows:
        answer = value_of(row, column)
        is_nan = isinstance(answer, float) and math.isnan(answer)  # as Parquet files write a missing number
        answers.append(None if is_nan else answer)
    if config.answer_pattern is None:
        return answers
    try:
        pattern = regex.compile(config.answer_pattern)
        matched = []
        for place, answer in zip(places, answers, strict=True):
            matched.append(_match(pattern, answer, f"{source}, {place}, column {column}"))
        return matched
    except (regex.error, TimeoutError) as error:
        mistake = f"data.answer_pattern={config.answer_pattern!r} is not a regular expression that works"
        raise ValueError(f"{mistake}: {error}") from error


def _match(pattern: regex.Pattern, answer: Any, location: str) -> str | list[str] | None:
    """The stripped text of the pattern's first group, or of its whole match; None if that is empty.

    For a list of answers, the list of what is found in each.
    """
    if answer is None:
        return None
    if isinstance(answer, list | tuple):
        found = [_match(pattern, item, location) for item in answer]
        return [item for item in found if item is not None] or None
    if isinstance(answer, Mapping | bytes):
        raise ValueError(f"{location} holds a {type(answer).__name__}: data.answer_pattern searches text")
    match = pattern.search(str(answer), timeout=PATTERN_SECONDS)
    group = 1 if pattern.groups else 0
    # A group that is not part of the match is None.
    text = match[group] if match else None
    return (text or "").strip() or None


def _why_empty(config: DataConfig, rows: Sequence[Mapping[str, Any]], column: str) -> str:
    """The reason why no row has a reference answer."""
    written = [value_of(row, column) for row in rows if not _is_missing(value_of(row, column))]
    if config.answer_pattern is None or not written:
        return "it is empty in every row"
    return f"data.answer_pattern={config.answer_pattern!r} matches nothing in {str(written[0])[:80]!r} and all others"

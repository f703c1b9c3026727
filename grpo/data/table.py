"""Check the rows of one split: prompts, reference answers, and the other columns for the
rewards."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from grpo.config import DataConfig
from grpo.data.chat import Prompt
from grpo.data.rows import read_rows
from grpo.data.tasks import Gym, task_of

PATTERN_SECONDS = 5.0
"""Seconds that matching ``answer_pattern`` to one row may take. A pattern can backtrack for years,
and Python's ``re`` has no time limit."""
MESSAGES_AS_TEXT = regex.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""Pattern of the start of a text that is a list of chat messages, in JSON or as Python prints a
list."""


@dataclass(frozen=True)
class Rows:
    """The checked rows of one split, before tokenization."""

    source: str
    """The setting that names the dataset (``data.dataset=...``), for messages."""
    prompts: list[Prompt]
    columns: list[dict]
    """The columns of each row except the prompt, for the rewards."""
    instructions: str | None = None
    """System prompt of a task, used if the configuration sets no system prompt. The tiny model
    never gets these instructions, because it was trained without them."""
    num_without_answer: int = 0
    """Number of rows whose answer is None."""
    places: Sequence[str] = ()
    """Name of each row in messages, such as ``row 7``. Empty for prompts that an environment or a
    chat makes."""
    lacks_prompts: bool = False
    """True if the rows have no column of prompts, because an environment makes the prompts."""

    def place_of(self, index: int) -> str:
        """Return the name of a row in messages: ``data.dataset=FILE, row 7``."""
        return f"{self.source}, {self.places[index]}" if self.places else self.source


def fingerprint(rows: Rows) -> str:
    """Return the SHA-256 of all prompts and columns, in the order of the rows. Files of the same
    name but with other rows have another fingerprint."""
    # A value that JSON cannot represent, such as an image, is replaced by the name of its type. Its
    # `repr` may hold an address in memory, which differs in every process.
    text = json.dumps(
        [rows.prompts, rows.columns],
        sort_keys=True,
        default=lambda value: type(value).__name__,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def load_rows(
    config: DataConfig,
    *,
    train: bool,
    seed: int,
    table: list[dict] | None = None,
    has_environment: bool = False,
) -> Rows | None:
    """Read and check the rows of the training or the evaluation split; return None if no evaluation
    split is configured.

    Args:
        table: rows of a Python program, used instead of the configured dataset.
        has_environment: True if an environment may make the prompts, so that rows may lack the
            column ``prompt``.

    Raises:
        ValueError: the rows cannot be read, or a row cannot be used. The message names that row.
    """
    key = "eval_dataset" if config.eval_dataset is not None and not train else "dataset"
    rows = read_rows(config, key, train=train, seed=seed) if table is None else table
    if rows is None:
        return None
    dataset = getattr(config, key)
    source = f"data.{key}={dataset}"
    if not rows:
        raise ValueError(f"{source} has no rows")
    places = [f"row {number}" for number in range(1, len(rows) + 1)]

    # A column that the user named must exist. Only the default column `prompt` may be missing.
    prompt_column = config.prompt_column
    lacks_prompts = has_environment and prompt_column == "prompt" and "prompt" not in rows[0]
    prompts = []
    columns = []
    for place, row in zip(places, rows, strict=True):
        try:
            prompts.append(_checked_prompt(value_of(row, prompt_column)))
        except ValueError as error:
            raise ValueError(f"{source}, {place}: {error}") from error
        # Rewards get the prompt as a separate argument, so its column is removed. If the prompt is
        # only a field of a column, the column stays.
        other_columns = dict(row)
        other_columns.pop(prompt_column, None)
        columns.append(other_columns)

    names = ", ".join(rows[0])
    if not lacks_prompts and not any(prompts):
        raise ValueError(
            f"data.prompt_column={prompt_column}: {source} has no such column, "
            f"or no prompts in it; it has {names}"
        )

    task = task_of(config, dataset)
    instructions = None
    answer_column = config.answer_column
    if task is not None:
        instructions = task.instructions
        answer_column = answer_column or "answer"

    num_without_answer = 0
    if answer_column:
        for place, row, other_columns in zip(places, rows, columns, strict=True):
            answer = value_of(row, answer_column)
            if config.answer_pattern and not _is_missing(answer):
                location = f"{source}, {place}, column {answer_column}"
                answer = _match(config.answer_pattern, answer, location)
            # A row without an answer is kept, because some rewards need no answer. The number of
            # such rows is printed.
            if _is_missing(answer):
                answer = None
                num_without_answer += 1
            other_columns["answer"] = answer
        # A task of reasoning-gym whose problems have many right answers may give no answer: its
        # scorer reads the column `metadata`.
        if num_without_answer == len(rows) and not isinstance(task, Gym):
            raise ValueError(
                f"no row of {source} has a value in data.answer_column={answer_column} (that fits "
                f"data.answer_pattern, {config.answer_pattern or 'unset'}); the columns are "
                f"{names}; data.answer_column=null, where no row has an answer"
            )
    elif config.answer_pattern is not None:
        raise ValueError(
            "data.answer_pattern needs data.answer_column, the column to search for the pattern"
        )
    return Rows(
        source,
        prompts,
        columns,
        instructions,
        num_without_answer,
        places,
        lacks_prompts,
    )


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a field in a column (``reward_model.ground_truth``); None
    if the value is missing."""
    # A column of exactly this name comes first, because names of columns may contain dots.
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _checked_prompt(prompt: Any) -> Prompt:
    """Return the checked prompt; "" if the prompt is missing.

    Raises:
        ValueError: the prompt is neither text nor a list of chat messages, or its last message is
            from the system or the model.
    """
    # A row without a prompt is left out later. It stays in the list here, so that other rows keep
    # their index.
    if _is_missing(prompt):
        return ""
    if isinstance(prompt, str) and not MESSAGES_AS_TEXT.match(prompt):
        return prompt
    if not isinstance(prompt, list):
        raise ValueError(
            f"a prompt is text, or a list of messages (no text of such a list), not {prompt!r:.80}"
        )
    messages = [_checked_message(message) for message in prompt]
    # After a message of the model, the template would start a second message of the model. A system
    # message alone asks nothing.
    role = messages[-1]["role"]
    if role in ("system", "assistant"):
        raise ValueError(f"a prompt ends with the user's message, not with one of the role {role}")
    return messages


def _checked_message(message: Any) -> dict:
    """Return a chat message without the keys whose value is None.

    All other keys are kept, because chat templates read ``tool_calls``, ``name``,
    ``reasoning_content`` and others.
    """
    checked = _without_none(message)
    if isinstance(checked, dict):
        for call in checked.get("tool_calls", ()):
            function = call.get("function", call)
            arguments = function.get("arguments")
            # OpenAI's format has arguments as JSON text. Chat templates convert arguments to JSON,
            # which would turn such a text into a quoted string.
            if isinstance(arguments, str):
                function["arguments"] = json.loads(arguments)
            # A message with a tool call may have no content, and many templates cannot append None
            # to a text.
            checked.setdefault("content", "")
        if "role" in checked and isinstance(checked.get("content"), str):
            return checked
    raise ValueError(
        f"a message of a prompt has a role, and text as content, and one is {message!r:.80}"
    )


def _without_none(value: Any) -> Any:
    """Return a copy without the keys whose value is None, at any depth.

    In Arrow, every message of a column has the keys of all messages. A template that tests whether
    a key exists would take None for a value.
    """
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _is_missing(value: Any) -> bool:
    """True for None, NaN, blank text and an empty list."""
    # Tables have NaN where a number is missing. 0 is a valid answer.
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, str):
        value = value.strip()
    return value in (None, "", [])


def _match(pattern: str, answer: Any, location: str) -> str:
    """Return the stripped text of the pattern's first group, or of the whole match if the pattern
    has no group; "" if nothing matches.

    ``location``: dataset, row and column, for messages.
    """
    # A list or mapping as text has the brackets and quotes of Python, which a pattern would match.
    if not isinstance(answer, str | int | float):
        raise ValueError(
            f"{location} holds a {type(answer).__name__}: data.answer_pattern searches text"
        )
    try:
        match = regex.search(pattern, str(answer), timeout=PATTERN_SECONDS)
    except (regex.error, TimeoutError) as error:
        raise ValueError(
            f"data.answer_pattern={pattern!r} is no regular expression that works: {error}"
        ) from error
    if match is None:
        return ""
    # A group that took no part in the match is None.
    text = match[1] if match.re.groups else match[0]
    return (text or "").strip()

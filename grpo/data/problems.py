"""Turn the rows of a dataset into problems: check the rows, render the prompts, tokenize them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex

from grpo.algorithm.batch import Problem
from grpo.config import DataConfig
from grpo.data import gym
from grpo.data.prompts import conversation, fill_question_template, render
from grpo.data.source import BUILTIN_PREFIX, dataset_setting, read_rows
from grpo.data.tasks import load_task
from grpo.data.tiny import is_tiny_tokenizer
from grpo.system import first_line

PATTERN_SECONDS = 5.0
"""Time limit of ``answer_pattern`` on one row. ``re`` has none, and a pattern can backtrack for years."""
CHARACTERS_PER_TOKEN = 100
"""Text has about 4 characters per token. A prompt with more than this many for each token that is allowed is too long, without being
tokenized: a megabyte takes seconds, in which Ctrl-C is not heard. If the vocabulary has a longer token, its length is used instead."""
TEXTS_AT_ONCE = 64
"""Prompts that are tokenized in one call. Between the calls a Ctrl-C is heard."""


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one split, and the numbers of rows left out and of rows without an answer."""

    problems: list[Problem]
    num_too_long: int = 0
    """Rows left out because their prompt has more than ``max_prompt_length`` tokens."""
    num_empty: int = 0
    """Rows left out because their prompt has no token."""
    num_without_answer: int = 0
    """Rows that are kept although ``answer_pattern`` matched nothing; their answer is None."""


@dataclass(frozen=True)
class Rows:
    """The checked rows of one split, before tokenization."""

    source: str
    """The setting that names the dataset (``data.dataset=...``), for messages."""
    prompts: list[str | list[dict[str, str]]]
    columns: list[dict[str, Any]]
    system_prompt: str | None
    instructions: str | None = None
    """The system prompt of a built-in task, if the configuration sets none. The tiny model gets none: it was trained without one."""
    num_without_answer: int = 0


def fingerprint(rows: Rows) -> str:
    """SHA-256 of all prompts and columns in order. Two files of the same name but different content have different fingerprints."""
    digest = hashlib.sha256()
    for row in zip(rows.prompts, rows.columns, strict=True):
        # A value that JSON cannot represent (an image) is replaced by the name of its type.
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()


def load_rows(config: DataConfig, *, train: bool, seed: int, given: list[dict[str, Any]] | None = None) -> Rows | None:
    """Read and check the rows of the training split or, with ``train=False``, the evaluation split; None if that is not configured.

    ``seed`` is for tasks whose problems are drawn; ``given`` are rows to use in place of those that the configuration names.

    Raises:
        ValueError: in one line, for a missing file, split or column, an unreadable line, an empty dataset, or a pattern that matches
            nothing.
    """
    limit = config.max_train_samples if train else config.max_eval_samples
    rows = read_rows(config, train=train, seed=seed) if given is None else given[:limit]
    if rows is None:
        return None
    key, dataset = dataset_setting(config, train)
    source = f"data.{key}={dataset}"
    if not rows:
        raise ValueError(f"{source} has no rows")
    is_builtin = dataset.startswith((BUILTIN_PREFIX, gym.PREFIX))
    answer_column = config.answer_column or ("answer" if is_builtin else None)
    for key, column in (("prompt_column", config.prompt_column), ("answer_column", answer_column)):
        if column is not None and column not in rows[0]:
            raise ValueError(f"data.{key}={column}: {source} has no such column; it has {', '.join(rows[0]) or 'none'}")
    if answer_column is not None and all(row[answer_column] is None for row in rows):
        raise ValueError(f"data.answer_column={answer_column}: it is empty in every row of {source}")
    pattern = _compile(config.answer_pattern)
    pattern_setting = f"data.answer_pattern={config.answer_pattern!r}"
    if pattern is not None and answer_column is None:
        raise ValueError(f"{pattern_setting} needs data.answer_column, the column to search for the pattern")
    prompts, columns, num_without_answer = [], [], 0
    for number, row in enumerate(rows, 1):
        location = f"{source}, row {number}, column {config.prompt_column}"
        prompts.append(_checked_prompt(row[config.prompt_column], location))
        others = {name: value for name, value in row.items() if name != config.prompt_column}
        if answer_column is not None:
            try:
                others["answer"] = _match_answer(row[answer_column], pattern)
            except TimeoutError:
                raise ValueError(
                    f"{pattern_setting} takes more than {PATTERN_SECONDS:g} s on row {number} of {source}, column {answer_column}: "
                    "simplify the repetitions in it"
                ) from None
            num_without_answer += pattern is not None and others["answer"] is None
        columns.append(others)
    if num_without_answer == len(rows):
        raise ValueError(
            f"{pattern_setting} matches nothing in column {answer_column!r} of {source}; "
            f"its first value is {str(rows[0][answer_column])[:80]!r}"
        )
    return Rows(source, prompts, columns, *system_prompt_and_instructions(config, dataset), num_without_answer)


def system_prompt_and_instructions(config: DataConfig, dataset: str) -> tuple[str | None, str | None]:
    """:attr:`Rows.system_prompt` and :attr:`Rows.instructions` for the rows of ``dataset``."""
    if config.system_prompt is not None:
        return config.system_prompt, None
    if dataset.startswith(gym.PREFIX):
        return gym.SYSTEM_PROMPT, None
    if dataset.startswith(BUILTIN_PREFIX):
        return None, load_task(dataset.removeprefix(BUILTIN_PREFIX)).instructions
    return None, None


def make_problems(rows: Rows, config: DataConfig, tokenizer: Any) -> ProblemSet:
    """Render and tokenize the prompts. A prompt that is too long is left out, never truncated.

    Raises:
        ValueError: if no prompt is left.
    """
    if rows.instructions and not is_tiny_tokenizer(tokenizer):
        rows = _with_instructions(rows, config, tokenizer)
    asked = _with_question_template(rows, config)
    texts = [_render_row(number, asked, config, tokenizer) for number in range(1, len(rows.prompts) + 1)]
    # A chat template writes every special token into the text. Without a template, the tokenizer adds its own (BOS).
    is_plain = not tokenizer.chat_template or config.prompt_template is not None
    most_characters = config.max_prompt_length * max(CHARACTERS_PER_TOKEN, max(map(len, tokenizer.get_vocab())))
    indices = [index for index, text in enumerate(texts) if len(text) <= most_characters]
    ids: list[list[int]] = []
    for start in range(0, len(indices), TEXTS_AT_ONCE):
        part = [texts[index] for index in indices[start : start + TEXTS_AT_ONCE]]
        ids += tokenizer(part, add_special_tokens=is_plain, verbose=False)["input_ids"]
    if is_plain:  # some tokenizers also add an EOS, after which a model cannot continue the prompt
        ids = [_without_added_eos(row, texts[index], tokenizer) for index, row in zip(indices, ids, strict=True)]
    problems = [
        Problem(
            index,
            rows.prompts[index],
            tuple(prompt_ids),
            rows.columns[index],
            reward_prompt=_reward_prompt(
                rows.prompts[index], asked.prompts[index], rows.system_prompt, config, tokenizer
            ),
        )
        for index, prompt_ids in zip(indices, ids, strict=True)
        if 0 < len(prompt_ids) <= config.max_prompt_length
    ]
    if not problems:
        shortest = f"{min(map(len, ids))} tokens" if ids else f"{min(map(len, texts))} characters"
        raise ValueError(
            f"all {len(texts)} prompts of {rows.source} are longer than data.max_prompt_length={config.max_prompt_length} tokens "
            f"(or empty): the shortest has {shortest}"
        )
    num_empty = sum(not prompt_ids for prompt_ids in ids)
    return ProblemSet(problems, len(texts) - len(problems) - num_empty, num_empty, rows.num_without_answer)


def _compile(pattern: str | None) -> regex.Pattern | None:
    try:
        return None if pattern is None else regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"data.answer_pattern={pattern!r} is not a regular expression: {error}") from None


def _match_answer(answer: Any, pattern: regex.Pattern | None) -> Any:
    """The answer itself without a pattern; with one, the stripped text of its first group (or whole match), None if that is empty.

    ``TimeoutError`` if the pattern takes too long.
    """
    if pattern is None or answer is None:
        return answer
    match = pattern.search(str(answer), timeout=PATTERN_SECONDS)
    found = match and match.group(1 if pattern.groups else 0)  # None for a group that is not part of the match
    return (found or "").strip() or None


def _checked_prompt(value: Any, location: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not value or not all(map(_is_message, value)):
        raise ValueError(f"{location}: expected text or a list of {{role, content}} messages, got {str(value)[:80]!r}")
    if value[-1]["role"] in ("system", "assistant"):
        role = value[-1]["role"]
        raise ValueError(f"{location}: the last message is of role {role!r}; a prompt ends with the user's")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _render_row(number: int, rows: Rows, config: DataConfig, tokenizer: Any) -> str:
    """The rendered prompt of a row; ``number`` counts rows from 1."""
    prompt = rows.prompts[number - 1]
    if config.prompt_template is not None and not isinstance(prompt, str) and len(prompt) > 1:
        reason = f"takes a single question, and this prompt is a conversation of {len(prompt)} messages"
        raise ValueError(f"{rows.source}, row {number}: data.prompt_template {reason}")
    try:
        return render(
            prompt, tokenizer, rows.system_prompt, config.few_shot, config.prompt_template, config.question_template
        )
    except Exception as error:  # a chat template is a program that comes with the model
        reason = first_line(error.__cause__ or error)
        location = f"row {number} of {rows.source}"
        raise ValueError(f"the model's chat template does not work on {location}: {reason}") from None


def _with_instructions(rows: Rows, config: DataConfig, tokenizer: Any) -> Rows:
    """Add the instructions of a built-in task: as the system prompt, or before each question if the chat template refuses one (Gemma 2)."""
    with_system_prompt = replace(rows, system_prompt=rows.instructions)
    try:
        _render_row(1, with_system_prompt, config, tokenizer)
    except ValueError:
        return replace(rows, prompts=[f"{rows.instructions}\n\n{prompt}" for prompt in rows.prompts])
    return with_system_prompt


def _with_question_template(rows: Rows, config: DataConfig) -> Rows:
    """The rows with their questions written into ``data.question_template``.

    Raises:
        ValueError: if the template names a column and there are worked examples, which have no columns.
    """
    template = config.question_template
    if template is None:
        return rows
    named = [name for name in rows.columns[0] if f"{{{name}}}" in template]
    if named and config.few_shot:
        reason = "stands for a column of the rows, and the questions of data.few_shot have no columns"
        raise ValueError(f"data.question_template: {{{named[0]}}} {reason}: leave one of the two out")
    pairs = zip(rows.prompts, rows.columns, strict=True)
    return replace(rows, prompts=[fill_question_template(template, prompt, columns) for prompt, columns in pairs])


def _without_added_eos(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    is_added = ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return ids[:-1] if is_added and len(ids) > 1 else ids


def _reward_prompt(
    prompt: str | list[dict[str, str]],
    asked: str | list[dict[str, str]],
    system_prompt: str | None,
    config: DataConfig,
    tokenizer: Any,
) -> str | list[dict[str, str]] | None:
    """The prompt as rewards get it (``data.conversational``): the messages that the model is shown, or text; ``None``: as in the row.

    Args:
        prompt: as in the row.
        asked: with its question in ``data.question_template``.
    """
    is_text, as_messages = isinstance(prompt, str), config.conversational
    if as_messages == "auto":
        as_messages = not is_text or bool(tokenizer.chat_template and (config.system_prompt or config.few_shot))
    if as_messages:
        system_prompt = system_prompt if config.prompt_template is None else None
        return conversation(asked, system_prompt, config.few_shot, config.question_template)
    return None if is_text else prompt[-1]["content"]


def count_shared(train: Sequence[Problem], evaluation: Sequence[Problem]) -> int:
    """The number of evaluation problems whose prompt is also the prompt of a training problem."""
    train_prompts = {problem.prompt_ids for problem in train}
    return sum(problem.prompt_ids in train_prompts for problem in evaluation)

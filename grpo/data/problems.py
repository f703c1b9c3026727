"""Datasets to problems: rows read and checked, prompts rendered and tokenized."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo.batch import Problem
from grpo.data.source import one_line, read_rows, source_of
from grpo.tasks import gym, load_task
from grpo.tasks.tiny import is_tiny_tokenizer


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one split and what was left out of them."""

    problems: list[Problem]
    num_too_long: int = 0
    """Rows whose prompt has more than ``max_prompt_length`` tokens."""
    num_empty: int = 0
    """Rows whose prompt has no token at all."""
    num_without_answer: int = 0
    """Rows in which ``answer_pattern`` matched nothing; their answer is None."""


@dataclass(frozen=True)
class Rows:
    """One split, read and checked, before a tokenizer has seen it."""

    what: str
    """Key and value that named the source, for messages."""
    prompts: list[str | list[dict[str, str]]]
    columns: list[dict[str, Any]]
    system_prompt: str | None
    instructions: str | None = None
    """What a built-in task asks for: the system prompt where there is no other, but for the tiny model, which was warm-started on it."""
    num_without_answer: int = 0


def fingerprint(rows: Rows) -> str:
    """SHA-256 over prompts and columns in order: two files of one name are told apart by it."""
    digest = hashlib.sha256()
    for row in zip(rows.prompts, rows.columns, strict=True):
        # A value that JSON has no word for (an image) counts by its type alone.
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()


def load_rows(config, *, train: bool, seed: int) -> Rows | None:
    """The training or the evaluation rows of a ``DataConfig``; needs neither tokenizer nor model.

    Args:
        config: the ``data`` section.
        train: the training split, or the evaluation split.
        seed: of the built-in tasks.

    Returns:
        None if the config names no evaluation data.

    Raises:
        ValueError: on a missing file, split or column, an unreadable line, an empty dataset, or a pattern that matches nothing.
            One line each.
    """
    rows = read_rows(config, train=train, seed=seed)
    if rows is None:
        return None
    key, source = source_of(config, train)
    what = f"data.{key}={source}"
    if not rows:
        raise ValueError(f"{what} has no rows")
    builtin = source.startswith(("builtin:", gym.PREFIX))
    answer_column = config.answer_column or ("answer" if builtin else None)
    for key, column in (("prompt_column", config.prompt_column), ("answer_column", answer_column)):
        if column is not None and column not in rows[0]:
            raise ValueError(f"data.{key}={column}: {what} has no such column; it has {', '.join(rows[0])}")
    if answer_column is not None and all(row[answer_column] is None for row in rows):
        raise ValueError(f"data.answer_column={answer_column}: it is empty in every row of {what}")
    pattern = _compile(config.answer_pattern)
    if pattern is not None and answer_column is None:
        raise ValueError(
            f"data.answer_pattern={config.answer_pattern!r} needs data.answer_column: the column it looks in"
        )
    prompts, columns, num_without_answer = [], [], 0
    for number, row in enumerate(rows, 1):
        prompts.append(_prompt_of(row[config.prompt_column], f"{what}, row {number}, column {config.prompt_column}"))
        others = {name: value for name, value in row.items() if name != config.prompt_column}
        if answer_column is not None:
            others["answer"] = extract(row[answer_column], pattern)
            num_without_answer += pattern is not None and others["answer"] is None
        columns.append(others)
    if num_without_answer == len(rows):
        raise ValueError(
            f"data.answer_pattern={config.answer_pattern!r} matches nothing in column {answer_column!r} of {what}; "
            f"its first value is {str(rows[0][answer_column])[:80]!r}"
        )
    return Rows(what, prompts, columns, *said_first(config, source), num_without_answer)


def said_first(config, source: str) -> tuple[str | None, str | None]:
    """The system prompt of rows from ``source``, and a built-in task's instructions."""
    if config.system_prompt is not None:
        return config.system_prompt, None
    if source.startswith(gym.PREFIX):
        return gym.SYSTEM_PROMPT, None
    if source.startswith("builtin:"):
        return None, load_task(source.removeprefix("builtin:")).instructions
    return None, None


def make_problems(rows: Rows, config, tokenizer: Any) -> ProblemSet:
    """Render and tokenize the prompts, and leave out (never truncate) those that are too long.

    Raises:
        ValueError: if none is left.
    """
    if rows.instructions and not is_tiny_tokenizer(tokenizer):
        rows = _with_instructions(rows, config, tokenizer)
    texts = [_rendered(number, rows, config, tokenizer) for number in range(1, len(rows.prompts) + 1)]
    # A chat template has put every special token where it belongs; without one the tokenizer adds its own (BOS).
    plain = not tokenizer.chat_template or config.prompt_template is not None
    ids = tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"]
    if plain:  # some tokenizers add an EOS too, after which there is nothing to say
        ids = [_without_added_end(row, text, tokenizer) for row, text in zip(ids, texts, strict=True)]
    problems = [
        Problem(index, prompt, tuple(prompt_ids), columns)
        for index, (prompt, prompt_ids, columns) in enumerate(zip(rows.prompts, ids, rows.columns, strict=True))
        if 0 < len(prompt_ids) <= config.max_prompt_length
    ]
    if not problems:
        raise ValueError(
            f"all {len(ids)} prompts of {rows.what} are longer than data.max_prompt_length={config.max_prompt_length} tokens "
            f"(or empty): the shortest has {min(map(len, ids))}"
        )
    num_empty = sum(not prompt_ids for prompt_ids in ids)
    return ProblemSet(problems, len(ids) - len(problems) - num_empty, num_empty, rows.num_without_answer)


def _compile(pattern: str | None) -> re.Pattern | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"data.answer_pattern={pattern!r} is not a regular expression: {error}") from None


def extract(answer: Any, pattern: re.Pattern | None) -> Any:
    """The first group (or whole match) of ``pattern`` in an answer, stripped; None if there is nothing in it. Without a
    pattern the answer itself."""
    if pattern is None or answer is None:
        return answer
    match = pattern.search(str(answer))
    found = match and match.group(1 if pattern.groups else 0)  # a group that took no part in the match is None
    return (found or "").strip() or None


def _prompt_of(value: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(f"{where}: expected text or a list of {{role, content}} messages, got {str(value)[:80]!r}")
    if value[-1]["role"] in ("system", "assistant"):
        raise ValueError(f"{where}: the last message is of role {value[-1]['role']!r}; a prompt ends with the user's")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _rendered(number: int, rows: Rows, config, tokenizer: Any) -> str:
    prompt = rows.prompts[number - 1]
    if config.prompt_template is not None and not isinstance(prompt, str) and len(prompt) > 1:
        raise ValueError(
            f"{rows.what}, row {number}: data.prompt_template has a place for one question, and this is a conversation of "
            f"{len(prompt)} messages"
        )
    try:
        return render(prompt, tokenizer, rows.system_prompt, config.few_shot, config.prompt_template)
    except Exception as error:  # a chat template is a program that came with the model
        raise ValueError(
            f"the model's chat template does not work on row {number} of {rows.what}: {one_line(error)}"
        ) from None


def _with_instructions(rows: Rows, config, tokenizer: Any) -> Rows:
    """As the system prompt, or, where a chat template takes none (Gemma 2), before each question."""
    told = replace(rows, system_prompt=rows.instructions)
    try:
        _rendered(1, told, config, tokenizer)
    except ValueError:
        return replace(rows, prompts=[f"{rows.instructions}\n\n{prompt}" for prompt in rows.prompts])
    return told


def _without_added_end(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    added = ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return ids[:-1] if added and len(ids) > 1 else ids


def render(
    prompt: str | list[dict[str, str]],
    tokenizer: Any,
    system_prompt: str | None,
    few_shot: Sequence[dict[str, str]],
    prompt_template: str | None = None,
) -> str:
    """The text the model sees: system prompt, worked examples, question, and the generation prompt of the chat template.

    A tokenizer without a chat template gets the same parts as plain text. With a ``prompt_template`` the text is that, with
    the question (a conversation of one message counts as one) in place of ``{prompt}``, and nothing else.
    """
    if prompt_template is not None:
        return prompt_template.replace("{prompt}", prompt if isinstance(prompt, str) else prompt[-1]["content"])
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    lead = []
    if turns[0]["role"] == "system":  # a row's own system prompt wins
        lead, turns = turns[:1], turns[1:]
    elif system_prompt:
        lead = [{"role": "system", "content": system_prompt}]
    for example in few_shot:
        lead.append({"role": "user", "content": example["prompt"]})
        lead.append({"role": "assistant", "content": example["completion"]})
    messages = lead + turns
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    *before, last = [message["content"] for message in messages]
    return "".join(text + "\n\n" for text in before) + last


def count_shared(train: Sequence[Problem], evaluation: Sequence[Problem]) -> int:
    """Evaluation problems whose prompt is also a training prompt."""
    seen = {problem.prompt_ids for problem in train}
    return sum(problem.prompt_ids in seen for problem in evaluation)

"""Turn the rows of a dataset into problems: check the rows, render the prompts, tokenize them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import regex

from grpo.algorithm.batch import Problem
from grpo.data.rows import BUILTIN_PREFIX, ENVIRONMENT_ROWS, GYM_PREFIX, dataset_setting, read_rows
from grpo.data.tasks import GYM_INSTRUCTIONS, load_task
from grpo.data.tiny import is_tiny_tokenizer

if TYPE_CHECKING:  # the tiny model and the tasks are used without pydantic
    from grpo.config import DataConfig

PATTERN_SECONDS = 5.0
"""Time limit of ``answer_pattern`` on one row. ``re`` has none, and a pattern can backtrack for years."""

Prompt = str | list[dict[str, str]]
"""A text, or chat messages with ``role`` and ``content``."""


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one split, and the numbers of rows left out and of rows without an answer."""

    problems: list[Problem]
    num_too_long: int = 0
    """Rows left out because their prompt has more than ``max_prompt_length`` tokens."""
    num_empty: int = 0
    """Rows left out because their prompt has no text or no token."""
    num_without_answer: int = 0
    """Rows that are kept although their answer is None: it was missing, or ``answer_pattern`` matched nothing."""


@dataclass(frozen=True)
class Rows:
    """The checked rows of one split, before tokenization."""

    source: str
    """The setting that names the dataset (``data.dataset=...``), for messages."""
    prompts: list[Prompt]
    columns: list[dict[str, Any]]
    instructions: str | None = None
    """The system prompt of a task, if the configuration sets none. The tiny model, trained without one, gets none."""
    num_without_answer: int = 0
    places: Sequence[str] = ()
    """The place of each row in its file (``line 7``), or its number in the split."""
    empty_cells: Mapping[str, int] = field(default_factory=dict)
    """The number of rows without a value, by column, of the columns that lack some."""


def fingerprint(rows: Rows) -> str:
    """SHA-256 of all prompts and columns in order, which tells two files of the same name apart."""
    digest = hashlib.sha256()
    for row in zip(rows.prompts, rows.columns, strict=True):
        # A value that JSON cannot represent (an image) is replaced by the name of its type.
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()


def load_rows(config: DataConfig, *, train: bool, seed: int, table: list[dict[str, Any]] | None = None) -> Rows | None:
    """Read and check the rows of the training or the evaluation split; None if no evaluation split is configured.

    ``table`` has rows of a Python program, in place of those that the configuration names.
    """
    limit = config.max_train_samples if train else config.max_eval_samples
    rows = read_rows(config, train=train, seed=seed) if table is None else table[:limit]
    if rows is None:
        return None
    key, dataset = dataset_setting(config, train)
    source = f"data.{key}={dataset}"
    if not rows:
        raise ValueError(f"{source} has no rows")
    is_task = dataset.startswith((BUILTIN_PREFIX, GYM_PREFIX))
    answer_column = config.answer_column or ("answer" if is_task else None)
    for key, column in (("prompt_column", config.prompt_column), ("answer_column", answer_column)):
        if column is not None and column not in rows[0]:
            raise ValueError(f"data.{key}={column}: {source} has no such column; it has {', '.join(rows[0])}")
    places = [getattr(row, "place", f"row {number} of the split") for number, row in enumerate(rows, 1)]
    prompts = [_checked(row[config.prompt_column], f"{source}, {at}") for at, row in zip(places, rows, strict=True)]
    empty_cells = Counter(n for row in rows for n, value in row.items() if value is None or not str(value).strip())
    columns = [{name: value for name, value in row.items() if name != config.prompt_column} for row in rows]
    num_without_answer = 0
    if answer_column is not None:
        answers = [row[answer_column] for row in rows]
        first = next((str(answer)[:80] for answer in answers if answer is not None), None)
        if config.answer_pattern is not None:
            answers = _matched(answers, config.answer_pattern)
        num_without_answer = answers.count(None)
        if all(answer is None for answer in answers):
            pattern = f"data.answer_pattern={config.answer_pattern!r} matches nothing in {first!r} and all others"
            reason = pattern if config.answer_pattern and first is not None else "it is empty in every row"
            raise ValueError(f"data.answer_column={answer_column} of {source}: {reason}")
        columns = [row | {"answer": answer} for row, answer in zip(columns, answers, strict=True)]
    elif config.answer_pattern is not None:
        raise ValueError("data.answer_pattern needs data.answer_column, the column to search for the pattern")
    return Rows(source, prompts, columns, instructions_of(config, dataset), num_without_answer, places, empty_cells)


def instructions_of(config: DataConfig, dataset: str) -> str | None:
    """:attr:`Rows.instructions` for the rows of ``dataset``."""
    if config.system_prompt is not None:
        return None
    if dataset.startswith(GYM_PREFIX):
        return GYM_INSTRUCTIONS
    return load_task(dataset.removeprefix(BUILTIN_PREFIX)).instructions if dataset.startswith(BUILTIN_PREFIX) else None


def _checked(prompt: Any, location: str) -> Prompt:
    """The prompt, or "" without any text: such a row is left out later, so that the others keep their index."""
    if prompt is None or isinstance(prompt, str):
        return prompt if (prompt or "").strip() else ""
    is_chat = isinstance(prompt, list | tuple) and prompt and all(map(_is_message, prompt))
    if not is_chat or prompt[-1]["role"] in ("system", "assistant"):
        expected = "a prompt is text, or a list of {role, content} messages that ends with the user's"
        raise ValueError(f"{location}: {expected}, not {prompt!r:.80}")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _matched(answers: Sequence[Any], pattern: str) -> list[str | None]:
    """The stripped text of the pattern's first group, or of its whole match, in each answer; None if that is empty."""
    try:
        compiled = regex.compile(pattern)
        matches = [None if a is None else compiled.search(str(a), timeout=PATTERN_SECONDS) for a in answers]
    except (regex.error, TimeoutError) as error:
        raise ValueError(f"data.answer_pattern={pattern!r} is not a regular expression that works: {error}") from error
    group = 1 if compiled.groups else 0  # a group that is not part of the match is None
    return [((match and match[group]) or "").strip() or None for match in matches]


def make_problems(
    rows: Rows, config: DataConfig, tokenizer: Any, *, schemas_of: Callable[[dict[str, Any]], list] | None = None
) -> ProblemSet:
    """Render and tokenize the prompts. A prompt that is too long is left out, never truncated.

    ``schemas_of`` a row's columns are the tools that its prompt shows, in runs with turns; None: completions are one
    turn.
    """
    system_prompt, few_shot, prompts = config.system_prompt, config.few_shot, rows.prompts
    if system_prompt is None and not is_tiny_tokenizer(tokenizer):
        system_prompt = rows.instructions
    if (template := config.question_template) is not None:
        for name in rows.columns[0]:
            if few_shot and f"{{{name}}}" in template:
                raise ValueError(f"data.question_template: {{{name}}} is a column, and data.few_shot have no columns")
        pairs = zip(prompts, rows.columns, strict=True)
        prompts = [fill_question_template(template, prompt, columns) for prompt, columns in pairs]
        few_shot = [{**shot, "prompt": fill_question_template(template, shot["prompt"], {})} for shot in few_shot]
    schemas = [schemas_of(columns) if schemas_of else None for columns in rows.columns]
    texts = [
        render(prompt, tokenizer, system_prompt, few_shot, config.prompt_template, shown)
        for prompt, shown in zip(prompts, schemas, strict=True)
    ]
    # A chat template writes every special token into the text. Without a template, the tokenizer adds its own (BOS).
    is_plain = not tokenizer.chat_template or config.prompt_template is not None
    ids = tokenizer(texts, add_special_tokens=is_plain, verbose=False)["input_ids"]
    if is_plain:  # some tokenizers also add an EOS, after which a model cannot continue the prompt
        ids = [_without_added_eos(row, text, tokenizer) for row, text in zip(ids, texts, strict=True)]

    is_filled = [bool(prompt) or config.dataset == ENVIRONMENT_ROWS for prompt in rows.prompts]

    def reward_prompt(index: int) -> Prompt | None:
        """The prompt for rewards (``data.conversational``): the model's messages, or text; None: as in the row."""
        is_text, as_messages = isinstance(rows.prompts[index], str), config.conversational
        if as_messages == "auto":
            as_messages = not is_text or schemas_of is not None
            as_messages |= bool(tokenizer.chat_template and (config.system_prompt or config.few_shot))
        if as_messages:
            shown = system_prompt if config.prompt_template is None else None
            return conversation(prompts[index], shown, few_shot)
        return None if is_text else rows.prompts[index][-1]["content"]

    problems = [
        Problem(i, rows.prompts[i], tuple(prompt_ids), rows.columns[i], reward_prompt=reward_prompt(i))
        for i, prompt_ids in enumerate(ids)
        if is_filled[i] and 0 < len(prompt_ids) <= config.max_prompt_length
    ]
    lengths = [len(row) for row, has_text in zip(ids, is_filled, strict=True) if has_text and row]
    num_empty = len(ids) - len(lengths)
    if not problems:
        limit = f"longer than data.max_prompt_length={config.max_prompt_length} tokens or empty"
        shortest = f": the shortest has {min(lengths)}" if lengths else ""
        raise ValueError(f"all {len(ids)} prompts of {rows.source} are {limit}{shortest}")
    return ProblemSet(problems, len(ids) - len(problems) - num_empty, num_empty, rows.num_without_answer)


def _without_added_eos(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    is_added = ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return ids[:-1] if is_added and len(ids) > 1 else ids


def count_shared(train: Sequence[Problem], evaluation: Sequence[Problem]) -> int:
    """The number of evaluation problems whose prompt is also the prompt of a training problem."""
    train_prompts = {problem.prompt_ids for problem in train}
    return sum(problem.prompt_ids in train_prompts for problem in evaluation)


def render(
    prompt: Prompt, tokenizer: Any, system_prompt: str | None, few_shot: Sequence[dict[str, str]],
    prompt_template: str | None = None, schemas: Sequence[dict[str, Any]] | None = None,
) -> str:  # fmt: skip
    """The text that the model reads: system prompt, worked examples and question in the chat template.

    Without a chat template they are joined as plain text. A ``prompt_template`` replaces everything but the question.
    """
    messages = conversation(prompt, system_prompt, few_shot)
    if prompt_template is not None:
        if not isinstance(prompt, str) and len(prompt) > 1:
            raise ValueError(f"data.prompt_template takes one question, and a prompt has {len(prompt)} messages")
        return prompt_template.replace("{prompt}", messages[-1]["content"])
    if tokenizer.chat_template:
        try:
            return tokenizer.apply_chat_template(
                messages, tools=list(schemas) if schemas else None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a chat template is a program that comes with the model
            raise ValueError(f"the model's chat template refuses {str(messages)[:200]}: {error}") from error
    return "\n\n".join(message["content"] for message in messages)


def conversation(prompt: Prompt, system_prompt: str | None, few_shot: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """A prompt as chat messages: system prompt, worked examples, question."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    lead = []
    if turns[0]["role"] == "system":  # the system prompt of a row replaces the configured one
        lead, turns = turns[:1], turns[1:]
    elif system_prompt:
        lead = [{"role": "system", "content": system_prompt}]
    for example in few_shot:
        lead.append({"role": "user", "content": example["prompt"]})
        lead.append({"role": "assistant", "content": example["completion"]})
    return lead + turns


def fill_question_template(template: str, prompt: Prompt, columns: Mapping[str, Any]) -> Prompt:
    """The prompt with its question, or the last message of a conversation, written into ``template``.

    ``{prompt}`` is the question, ``{NAME}`` the column of that name, a list with one item per line. Other braces stay.
    """
    if not isinstance(prompt, str):
        last = prompt[-1] | {"content": fill_question_template(template, prompt[-1]["content"], columns)}
        return [*prompt[:-1], last]
    values = {**columns, "prompt": prompt}

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1], match[0])
        return "\n".join(map(str, found)) if isinstance(found, list | tuple) else "" if found is None else str(found)

    return re.sub(r"\{(\w+)\}", value, template)

"""Turn the rows of a dataset into problems: render the prompts and tokenize them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo.algorithm.batch import Problem
from grpo.data.chat import Prompt, RenderedPrompts, conversation, encode, hidden_message, render
from grpo.data.rows import ENVIRONMENT_ROWS
from grpo.data.table import Rows, value_of
from grpo.data.tiny import is_tiny_tokenizer

if TYPE_CHECKING:  # the tiny model and the tasks are used without pydantic
    from grpo.config import DataConfig


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
    num_repaired: int = 0
    """Rows whose prompt holds half of a character (a lone surrogate), which the model reads as U+FFFD."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the form of the prompts."""


def make_problems(
    rows: Rows,
    config: DataConfig,
    tokenizer: Any,
    *,
    schemas_of: Callable[[dict[str, Any]], list] | None = None,
) -> ProblemSet:
    """Render and tokenize the prompts. A prompt that is too long is left out, never truncated.

    ``schemas_of``: in runs with turns, a function from a row's columns to the tools that its prompt shows; None:
    completions have one turn.
    """
    # Before a task's own instructions are filled in: only a system prompt of the user's makes messages of a text.
    as_messages = _as_messages(config, tokenizer, has_turns=schemas_of is not None)
    if config.system_prompt is None and not is_tiny_tokenizer(tokenizer):
        config = config.model_copy(update={"system_prompt": rows.instructions})
    prompts = rows.prompts
    if config.question_template is not None:
        config, prompts = _fill_questions(rows, config)
    uses_template = bool(tokenizer.chat_template) and config.prompt_template is None
    notes = []
    if uses_template and rows.places:  # the texts of environments and of a chat are no rows of a dataset
        notes += _check_rendered(rows, prompts, tokenizer)

    texts = []
    hidden = []
    num_repaired = 0
    for index, (prompt, columns) in enumerate(zip(prompts, rows.columns, strict=True)):
        try:
            text = render(
                prompt,
                tokenizer,
                system_prompt=config.system_prompt,
                few_shot=config.few_shot,
                prompt_template=config.prompt_template,
                schemas=schemas_of(columns) if schemas_of else None,
                template_kwargs=config.chat_template_kwargs,
            )
        except ValueError as error:
            raise ValueError(f"{rows.place_of(index)}: {error}") from error
        if uses_template:
            messages = conversation(prompt, config.system_prompt, config.few_shot)
            hidden.append(hidden_message(messages, text))
        # JSON text that was cut between the escapes of an emoji holds half of it, which no tokenizer takes.
        whole_characters = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        num_repaired += text != whole_characters
        texts.append(whole_characters)
    if uses_template:  # the template has written BOS and all other special tokens
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = encode(tokenizer, texts)

    problems = []
    lengths = []
    may_be_empty = rows.lacks_prompts or config.dataset == ENVIRONMENT_ROWS
    for index, prompt_ids in enumerate(ids):
        has_text = bool(rows.prompts[index]) or may_be_empty
        if not has_text or not prompt_ids:
            continue
        lengths.append(len(prompt_ids))
        if len(prompt_ids) <= config.max_prompt_length:
            problem = Problem(index, rows.prompts[index], tuple(prompt_ids), rows.columns[index])
            form = _reward_prompt(problem.prompt, prompts[index], config, as_messages)
            problems.append(replace(problem, reward_prompt=form))
    if not problems:
        # The shortest prompt tells how much the limit must be raised.
        limit = f"longer than data.max_prompt_length={config.max_prompt_length} tokens or empty"
        shortest = f": the shortest has {min(lengths)}" if lengths else ""
        raise ValueError(f"all {len(ids)} prompts of {rows.source} are {limit}{shortest}")
    notes += _notes(prompts, config, tokenizer)
    notes += _notes_on_hidden(hidden)
    if rows.lacks_prompts:
        notes.append(f"note: {rows.source} has no column prompt: reset() makes the prompts")
    if schemas_of is None and rows.columns[0].get("tools"):
        notes.append("note: the prompts do not show the column tools, which rewards alone get")
    return ProblemSet(
        problems,
        num_too_long=len(lengths) - len(problems),
        num_empty=len(ids) - len(lengths),
        num_without_answer=rows.num_without_answer,
        num_repaired=num_repaired,
        notes=tuple(notes),
    )


def _fill_questions(rows: Rows, config: DataConfig) -> tuple[DataConfig, list[Prompt]]:
    """The configuration with its worked examples, and the prompts, written into ``question_template``."""
    template = config.question_template
    for name in rows.columns[0]:
        is_named = re.search(rf"\{{{re.escape(name)}[.}}]", template)
        if config.few_shot and is_named:
            raise ValueError(f"data.question_template: {{{name}}} is a column, and data.few_shot have no columns")
    prompts = []
    for prompt, columns in zip(rows.prompts, rows.columns, strict=True):
        prompts.append(fill_question_template(template, prompt, columns))
    few_shot = []
    for example in config.few_shot:
        few_shot.append({**example, "prompt": fill_question_template(template, example["prompt"], {})})
    return config.model_copy(update={"few_shot": few_shot}), prompts


def _check_rendered(rows: Rows, prompts: Sequence[Prompt], tokenizer: Any) -> Iterator[str]:
    """``ValueError`` for a text that a chat template has rendered already: it would be a user's message in it again.

    A note for texts that hold other special tokens.
    """
    rendered = RenderedPrompts(tokenizer)
    places = []
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            continue
        mark = rendered.mark_in(prompt)
        if mark is not None:
            raise ValueError(
                f"{rows.place_of(index)}: the prompt holds {mark!r}, as a text that is rendered already, and would "
                "be rendered again by the model's chat template: data.prompt_template='{prompt}' takes it as it is"
            )
        if rendered.special_in(prompt):
            places.append(index)
    if places:
        first = rows.place_of(places[0])
        token = rendered.special_in(prompts[places[0]])
        yield (
            f"warning: {len(places)} prompts hold a special token of the tokenizer, first {first} with {token!r}: "
            "the model reads the token, not its letters"
        )


def _as_messages(
    config: DataConfig,
    tokenizer: Any,
    *,
    has_turns: bool,
) -> bool | None:
    """True if rewards get messages, False for text, None for the form of the row's prompt (``data.conversational``)."""
    if config.conversational != "auto":
        return config.conversational
    has_context = bool(config.system_prompt or config.few_shot)
    if has_turns or (tokenizer.chat_template and has_context):
        return True
    return None


def _reward_prompt(
    prompt: Prompt,
    shown: Prompt,
    config: DataConfig,
    as_messages: bool | None,
) -> Prompt | None:
    """The prompt for rewards: the messages that the model is ``shown``, or text; None: as in the row."""
    is_text = isinstance(prompt, str)
    if as_messages is None:
        as_messages = not is_text
    if as_messages:
        # A prompt template takes no system prompt, but a task's own instructions may be there.
        system_prompt = config.system_prompt if config.prompt_template is None else None
        return conversation(shown, system_prompt, config.few_shot)
    if is_text:
        return None
    return prompt[-1]["content"]


def _notes(prompts: Sequence[Prompt], config: DataConfig, tokenizer: Any) -> Iterator[str]:
    """Notes on prompts that lose something without a chat template, and on variables that the template lacks."""
    has_messages = any(not isinstance(prompt, str) for prompt in prompts)
    has_roles = bool(has_messages or config.system_prompt or config.few_shot)
    if has_roles and not tokenizer.chat_template:
        yield "note: the model has no chat template: its prompts are plain text, messages without their roles"
    template = "" if config.prompt_template else str(tokenizer.chat_template or "")
    if "strftime_now" in template and "date_string" not in config.chat_template_kwargs:
        yield (
            "note: the chat template may write today's date into the prompts, so a run that continues tomorrow gets "
            "others: data.chat_template_kwargs={date_string: 26 Jul 2024} fixes that of Llama 3"
        )
    for name in config.chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            yield f"note: data.chat_template_kwargs: the chat template of these prompts has no variable {name}"


def _notes_on_hidden(hidden: Sequence[dict[str, Any] | None]) -> Iterator[str]:
    """A warning if prompts do not show a message: ``hidden`` has one for each such prompt, else None."""
    found = [message for message in hidden if message is not None]
    if not found:
        return
    role = found[0]["role"]
    content = found[0]["content"]
    yield (
        f"warning: {len(found)} prompts do not show the {role}'s message {content!r:.60} as it is, since the chat "
        "template leaves it out or changes it: python -m grpo.data prints what the model reads"
    )


def count_shared(train: Sequence[Problem], evaluation: Sequence[Problem]) -> int:
    """The number of evaluation problems whose prompt is also the prompt of a training problem."""
    train_prompts = {problem.prompt_ids for problem in train}
    return sum(problem.prompt_ids in train_prompts for problem in evaluation)


def fill_question_template(template: str, prompt: Prompt, columns: Mapping[str, Any]) -> Prompt:
    """The prompt with its question, or the last message of a conversation, written into ``template``.

    ``{prompt}`` is the question, ``{NAME}`` the column of that name, ``{NAME.FIELD}`` a field in it: a list with one
    item per line, a mapping as JSON. Other braces stay.
    """
    if not isinstance(prompt, str):
        question = fill_question_template(template, prompt[-1]["content"], columns)
        return [*prompt[:-1], prompt[-1] | {"content": question}]
    values = {**columns, "prompt": prompt}

    def value(match: re.Match[str]) -> str:
        column = match[1].partition(".")[0]
        if column not in values:
            return match[0]
        found = value_of(values, match[1])
        if found is None:
            return ""
        if isinstance(found, list | tuple):
            return "\n".join(map(str, found))
        if isinstance(found, Mapping):
            return json.dumps(found, ensure_ascii=False)
        return str(found)

    return re.sub(r"\{(\w+(?:\.\w+)*)\}", value, template)

"""Turn the rows of a dataset into problems: render the prompts and tokenize them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.algorithm.batch import Problem
from grpo.config import DataConfig
from grpo.data.chat import Prompt, conversation, encode, marks_of_turns, render
from grpo.data.table import Rows, value_of
from grpo.data.tiny import is_tiny_tokenizer


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one split, and the numbers of rows left out and of rows without an answer."""

    problems: list[Problem]
    num_too_long: int = 0
    """Rows left out because their prompt has more than ``max_prompt_length`` tokens."""
    num_empty: int = 0
    """Rows left out because their prompt has no text or no token."""
    num_without_answer: int = 0
    """Rows that are kept although their answer is None: it was missing, or ``answer_pattern``
    matched nothing."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the form of the prompts."""


def make_problems(
    rows: Rows,
    config: DataConfig,
    tokenizer: Any,
    *,
    schemas_of: Callable[[dict], list] | None = None,
) -> ProblemSet:
    """Render and tokenize the prompts. A prompt that is too long is left out, never truncated.

    ``schemas_of``: in runs with turns, a function from a row's columns to the tools that its prompt
    shows; None: completions have one turn."""
    has_template = bool(tokenizer.chat_template) and config.prompt_template is None
    form = config.conversational
    # Before a task's own instructions are filled in: only a system prompt of the user's makes
    # messages of a text.
    has_context = bool(config.system_prompt or config.few_shot)
    if form == "auto" and (schemas_of is not None or (has_template and has_context)):
        form = True
    takes_instructions = config.system_prompt is None and config.prompt_template is None
    if takes_instructions and not is_tiny_tokenizer(tokenizer):
        config = config.model_copy(update={"system_prompt": rows.instructions})
    shown = rows.prompts
    if config.question_template is not None:
        shown = []
        for prompt, columns in zip(rows.prompts, rows.columns, strict=True):
            shown.append(fill_question_template(config.question_template, prompt, columns))

    marks = marks_of_turns(tokenizer) if has_template else set()
    texts = []
    for index, prompt in enumerate(shown):
        schemas = schemas_of(rows.columns[index]) if schemas_of else ()
        try:
            # The texts of environments and of a chat are no rows of a dataset.
            if rows.places and isinstance(prompt, str):
                _check_not_rendered(prompt, marks)
            text = render(prompt, tokenizer, config, schemas)
            text.encode()  # half of a character, a lone surrogate, is no text
        except ValueError as error:
            raise ValueError(f"{rows.place_of(index)}: {error}") from error
        texts.append(text)
    if has_template:  # the template has written BOS and all other special tokens
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = encode(tokenizer, texts)

    problems = []
    lengths = []
    for index, prompt_ids in enumerate(ids):
        prompt = rows.prompts[index]
        has_text = bool(prompt) or rows.lacks_prompts
        if not has_text or not prompt_ids:
            continue
        lengths.append(len(prompt_ids))
        if len(prompt_ids) <= config.max_prompt_length:
            reward_prompt = _reward_prompt(prompt, shown[index], config, form)
            problems.append(
                Problem(index, prompt, tuple(prompt_ids), rows.columns[index], reward_prompt)
            )
    if not problems:
        # The shortest prompt tells how much the limit must be raised.
        limit = f"longer than data.max_prompt_length={config.max_prompt_length} tokens or empty"
        shortest = min(lengths, default=0)
        raise ValueError(
            f"all {len(ids)} prompts of {rows.source} are {limit}: the shortest has {shortest}"
        )
    return ProblemSet(
        problems,
        num_too_long=len(lengths) - len(problems),
        num_empty=len(ids) - len(lengths),
        num_without_answer=rows.num_without_answer,
        notes=tuple(_notes(config, tokenizer, texts[0])),
    )


def _check_not_rendered(prompt: str, marks: set[str]) -> None:
    """``ValueError`` for a text that a chat template has rendered already: it would be a user's
    message in it again."""
    for mark in marks:
        # A question may be about <s> and </s>, but hardly about <|im_end|> or [INST].
        if mark in prompt:
            raise ValueError(
                f"the prompt holds {mark!r}, as a text that is rendered already, and would be rendered again by the "
                "model's chat template: data.prompt_template='{prompt}' takes it as it is"
            )


def _reward_prompt(
    prompt: Prompt,
    shown: Prompt,
    config: DataConfig,
    form: bool | str,
) -> Prompt | None:
    """The prompt for rewards: the messages that the model is ``shown``, or text; None: as in the
    row.

    ``form``: True for messages, False for text, ``auto`` for the form of the row's prompt.
    """
    is_text = isinstance(prompt, str)
    if form is True or (form == "auto" and not is_text):
        return conversation(shown, config)
    return None if is_text else prompt[-1]["content"]


def _notes(config: DataConfig, tokenizer: Any, text: str) -> Iterator[str]:
    """Notes on a system prompt, a date and variables that a chat template has or lacks. ``text``:
    the first prompt."""
    template = "" if config.prompt_template else str(tokenizer.chat_template or "")
    if "strftime_now" in template and "date_string" not in config.chat_template_kwargs:
        yield "note: the chat template may write today's date: data.chat_template_kwargs={date_string: 26 Jul 2024}"
    for name in config.chat_template_kwargs:
        if name not in template:
            yield f"note: data.chat_template_kwargs: the chat template of these prompts has no variable {name}"
    for name in re.findall(r"\{[A-Za-z_][\w.]*\}", config.question_template or ""):
        if name in text:
            yield f"warning: data.question_template: {name} is no column, and stays as it is"
    if config.system_prompt and config.system_prompt.strip() not in text:
        yield "warning: the first prompt does not hold data.system_prompt: python -m grpo.data prints it"


def count_shared(train: Sequence[Problem], evaluation: Sequence[Problem]) -> int:
    """The number of evaluation problems whose prompt is also the prompt of a training problem."""
    train_prompts = {problem.prompt_ids for problem in train}
    return sum(problem.prompt_ids in train_prompts for problem in evaluation)


def fill_question_template(template: str, prompt: Prompt, columns: Mapping[str, Any]) -> Prompt:
    """The prompt with its question, or the last message of a conversation, written into
    ``template``.

    ``{prompt}`` is the question, ``{NAME}`` the column of that name, ``{NAME.FIELD}`` a field in
    it: a list with one item per line. Other braces stay."""
    if not isinstance(prompt, str):
        *others, last = prompt
        question = fill_question_template(template, last["content"], columns)
        return [*others, {**last, "content": question}]
    values = {**columns, "prompt": prompt}

    def value(match: re.Match[str]) -> str:
        column = match[1].partition(".")[0]
        if column not in values:
            return match[0]
        found = value_of(values, match[1])
        if found is None:
            return ""
        if isinstance(found, list):
            return "\n".join(map(str, found))
        return str(found)

    return re.sub(r"\{(\w+(?:\.\w+)*)\}", value, template)

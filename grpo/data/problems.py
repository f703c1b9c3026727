"""Turn the rows of a dataset into problems: render the prompts and tokenize them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.algorithm.batch import Problem
from grpo.config import DataConfig
from grpo.data.chat import Prompt, conversation, encode, render, turn_markers
from grpo.data.table import Rows, value_of
from grpo.data.tiny import is_tiny_tokenizer


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one split, with the numbers of rows that were left out or have no answer."""

    problems: list[Problem]
    num_too_long: int = 0
    """Number of rows left out because their prompt has more than ``max_prompt_length`` tokens."""
    num_empty: int = 0
    """Number of rows left out because their prompt has no text or no token."""
    num_without_answer: int = 0
    """Number of rows whose answer is None, because it is missing or ``answer_pattern`` matched
    nothing. These rows are not left out."""
    notes: tuple[str, ...] = ()
    """Notes and warnings about the rendered prompts, printed for the user."""


def make_problems(
    rows: Rows,
    config: DataConfig,
    tokenizer: Any,
    *,
    schemas: Sequence[Mapping] | None = None,
) -> ProblemSet:
    """Render and tokenize the prompts. A prompt that is too long is left out, never truncated.

    Args:
        schemas: schemas of the tools that prompts show. Default: the run has neither tools nor an
            environment.

    Raises:
        ValueError: a prompt cannot be rendered, a chat template has rendered it already, or no
            problem is left.
    """
    has_template = bool(tokenizer.chat_template) and config.prompt_template is None

    # Rewards get messages instead of text if the user set a system prompt or examples, or in a run
    # with tools or an environment. This is decided before a task's instructions are filled in as a
    # system prompt below, because rewards get text despite those instructions.
    conversational = config.conversational
    if conversational == "auto":
        has_context = bool(config.system_prompt or config.few_shot)
        if schemas is not None or (has_template and has_context):
            conversational = True

    # The tiny model was trained on demonstrations without instructions.
    takes_instructions = config.system_prompt is None and config.prompt_template is None
    if takes_instructions and not is_tiny_tokenizer(tokenizer):
        config = config.model_copy(update={"system_prompt": rows.instructions})
    shown_prompts = rows.prompts
    if config.question_template is not None:
        shown_prompts = [
            fill_question_template(config.question_template, prompt, columns)
            for prompt, columns in zip(rows.prompts, rows.columns, strict=True)
        ]

    markers = turn_markers(tokenizer) if has_template else set()
    texts = []
    for index, prompt in enumerate(shown_prompts):
        try:
            # Rows without a place come from an environment or a chat, where a marker is no sign of
            # a rendered dataset.
            if rows.places and isinstance(prompt, str):
                _check_not_rendered(prompt, markers)
            text = render(prompt, tokenizer, config, schemas or ())
            # A lone surrogate (half of a character) cannot be encoded. It is refused here, where
            # the message can name the row.
            text.encode()
        except ValueError as error:
            raise ValueError(f"{rows.place_of(index)}: {error}") from error
        texts.append(text)

    # A chat template writes BOS itself, so the tokenizer must not add a second BOS.
    if has_template:
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = encode(tokenizer, texts)

    # A problem has the index of its row, also if rows before it are left out. The seeds of
    # completions depend on the index, and a filter must not change the seeds of other rows.
    problems = []
    lengths = []
    for index, prompt_ids in enumerate(ids):
        prompt = rows.prompts[index]
        has_text = bool(prompt) or rows.lacks_prompts
        if not has_text or not prompt_ids:
            continue
        lengths.append(len(prompt_ids))
        if len(prompt_ids) <= config.max_prompt_length:
            reward_prompt = _reward_prompt(prompt, shown_prompts[index], config, conversational)
            problems.append(
                Problem(index, prompt, tuple(prompt_ids), rows.columns[index], reward_prompt)
            )
    if not problems:
        # The shortest prompt shows how much the limit must be raised.
        raise ValueError(
            f"all {len(ids)} prompts of {rows.source} are longer than data.max_prompt_length="
            f"{config.max_prompt_length} tokens or empty: the shortest has "
            f"{min(lengths, default=0)}"
        )
    return ProblemSet(
        problems,
        num_too_long=len(lengths) - len(problems),
        num_empty=len(ids) - len(lengths),
        num_without_answer=rows.num_without_answer,
        notes=tuple(_notes(config, tokenizer, texts[0])),
    )


def _check_not_rendered(prompt: str, markers: set[str]) -> None:
    """Raise ``ValueError`` for a text that a chat template has rendered already.

    The chat template would render the whole text once more, as a user's message. The run would then
    train on prompts of a form that the model has never seen.
    """
    for marker in markers:
        # <s> and </s> are no markers here, because a question may be about them. Hardly any
        # question is about <|im_end|> or [INST].
        if marker in prompt:
            raise ValueError(
                f"the prompt holds {marker!r}, as a text that is rendered already, and would be "
                "rendered again by the model's chat template: "
                "data.prompt_template='{prompt}' takes it as it is"
            )


def _reward_prompt(
    prompt: Prompt,
    shown_prompt: Prompt,
    config: DataConfig,
    conversational: bool | str,
) -> Prompt | None:
    """Return the prompt for rewards, as messages or text; None if it equals the prompt of the row.

    Messages are the conversation that the model reads, with system prompt and examples. Text is the
    question of the row, without ``question_template``.

    Args:
        prompt: the prompt of the row.
        shown_prompt: the prompt of the row with ``question_template`` filled in.
        conversational: True for messages, False for text, ``"auto"`` for the form of ``prompt``.
    """
    is_text = isinstance(prompt, str)
    if conversational is True or (conversational == "auto" and not is_text):
        return conversation(shown_prompt, config)
    return None if is_text else prompt[-1]["content"]


def _notes(config: DataConfig, tokenizer: Any, first_text: str) -> Iterator[str]:
    """Yield notes on what may be wrong with the prompts: a template that writes today's date,
    unknown variables or columns, a missing system prompt.

    ``first_text``: the first prompt as the model reads it, checked as an example of all prompts.
    """
    template = "" if config.prompt_template else str(tokenizer.chat_template or "")
    # With another date, a run that continues tomorrow would train on other prompts.
    if "strftime_now" in template and "date_string" not in config.chat_template_kwargs:
        yield (
            "note: the chat template may write today's date: "
            "data.chat_template_kwargs={date_string: 26 Jul 2024}"
        )
    # Templates ignore unknown variables, so a misspelt variable would have no effect.
    for name in config.chat_template_kwargs:
        if name not in template:
            yield (
                "note: data.chat_template_kwargs: "
                f"the chat template of these prompts has no variable {name}"
            )
    for name in re.findall(r"\{[A-Za-z_][\w.]*\}", config.question_template or ""):
        if name in first_text:
            yield f"warning: data.question_template: {name} is no column, and stays as it is"
    # Some templates drop system messages without an error.
    if config.system_prompt and config.system_prompt.strip() not in first_text:
        yield (
            "warning: the first prompt does not hold data.system_prompt: "
            "python -m grpo.data prints it"
        )


def count_shared_prompts(
    train: Sequence[Problem],
    evaluation: Sequence[Problem],
    *,
    with_columns: bool,
) -> int:
    """Return the number of evaluation problems whose prompt is also the prompt of a training
    problem.

    Args:
        with_columns: True if the columns must be the same, too. All rows of an environment may
            have one prompt.
    """

    def identity(problem):
        return problem.prompt_ids, with_columns and repr(problem.columns)

    training = set(map(identity, train))
    return sum(identity(problem) in training for problem in evaluation)


def fill_question_template(template: str, prompt: Prompt, columns: Mapping[str, Any]) -> Prompt:
    """Return the prompt with its question written into ``template``. The question of a conversation
    is its last message.

    ``{prompt}`` stands for the question, ``{NAME}`` for the column NAME, ``{NAME.FIELD}`` for a
    field of that column. A list is written with one item per line. Other braces stay as they are.
    """
    if not isinstance(prompt, str):
        *others, last = prompt
        question = fill_question_template(template, last["content"], columns)
        return [*others, {**last, "content": question}]
    values = {**columns, "prompt": prompt}

    def text_of(match: re.Match[str]) -> str:
        name = match[1]
        column = name.partition(".")[0]
        # Other braces are no placeholders: they belong to code, LaTeX or JSON.
        if column not in values:
            return match[0]
        value = value_of(values, name)
        if value is None:
            return ""
        if isinstance(value, list):
            return "\n".join(map(str, value))
        return str(value)

    # One pass, so that braces inside a value are not filled in again.
    return re.sub(r"\{(\w+(?:\.\w+)*)\}", text_of, template)

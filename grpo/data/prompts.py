"""Prompts as the model reads them: question template, system prompt, worked examples, chat template."""

import re
from collections.abc import Mapping, Sequence
from typing import Any


def render(
    prompt: str | list[dict[str, str]],
    tokenizer: Any,
    system_prompt: str | None,
    few_shot: Sequence[dict[str, str]],
    prompt_template: str | None = None,
    question_template: str | None = None,
) -> str:
    """The text that the model reads: system prompt, worked examples, question, and the generation prompt of the chat template.

    For a tokenizer without a chat template the parts are joined as plain text. A ``prompt_template`` replaces everything else: its
    ``{prompt}`` becomes the question (or the only message of a conversation). ``question_template`` is that of the worked examples.
    """
    if prompt_template is not None:
        return prompt_template.replace("{prompt}", prompt if isinstance(prompt, str) else prompt[-1]["content"])
    messages = conversation(prompt, system_prompt, few_shot, question_template)
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    *before, last = [message["content"] for message in messages]
    return "".join(text + "\n\n" for text in before) + last


def conversation(
    prompt: str | list[dict[str, str]],
    system_prompt: str | None,
    few_shot: Sequence[dict[str, str]],
    question_template: str | None = None,
) -> list[dict[str, str]]:
    """A prompt as chat messages: system prompt, worked examples with their questions in ``question_template``, question as it is."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    lead = []
    if turns[0]["role"] == "system":  # the system prompt of a row replaces the configured one
        lead, turns = turns[:1], turns[1:]
    elif system_prompt:
        lead = [{"role": "system", "content": system_prompt}]
    for example in few_shot:
        question = fill_question_template(question_template or "{prompt}", example["prompt"], {})
        lead.append({"role": "user", "content": question})
        lead.append({"role": "assistant", "content": example["completion"]})
    return lead + turns


def fill_question_template(
    template: str, prompt: str | list[dict[str, str]], columns: Mapping[str, Any]
) -> str | list[dict[str, str]]:
    """The prompt with its question, or the last message of a conversation, written into ``template``.

    ``{prompt}`` is the question and ``{NAME}`` the column of that name, a list with one item per line. Braces around anything else stay.
    """
    if not isinstance(prompt, str):
        last = prompt[-1] | {"content": fill_question_template(template, prompt[-1]["content"], columns)}
        return [*prompt[:-1], last]
    values = {**columns, "prompt": prompt}

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1], match[0])
        return "\n".join(map(str, found)) if isinstance(found, (list, tuple)) else "" if found is None else str(found)

    return re.sub(r"\{(\w+)\}", value, template)

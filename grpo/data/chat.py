"""From a prompt to the text and the tokens that the model reads: chat template, special tokens, BOS."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Prompt = str | list[dict[str, Any]]
"""A text, or chat messages with ``role``, ``content`` and what else the chat template reads."""

MARKS = re.compile(r"<\|[^<>|\s]+\|>|\[/?[A-Z_]+\]|<\w+_of_\w+>")
"""Marks of turns that many chat templates write as plain text: ``<|user|>``, ``[INST]``, ``<start_of_turn>``."""


def conversation(
    prompt: Prompt,
    system_prompt: str | None,
    few_shot: Sequence[dict[str, str]],
) -> list[dict[str, Any]]:
    """A prompt as chat messages: system prompt, worked examples, question."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    lead = []
    if messages[0]["role"] == "system":  # the system prompt of a row replaces the configured one
        lead.append(messages.pop(0))
    elif system_prompt:
        lead.append({"role": "system", "content": system_prompt})
    for example in few_shot:
        lead.append({"role": "user", "content": example["prompt"]})
        lead.append({"role": "assistant", "content": example["completion"]})
    return lead + messages


def render(
    prompt: Prompt,
    tokenizer: Any,
    system_prompt: str | None,
    few_shot: Sequence[dict[str, str]],
    prompt_template: str | None = None,
    schemas: Sequence[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that the model reads: system prompt, worked examples and question in the chat template.

    Without a chat template they are joined as plain text. A ``prompt_template`` replaces everything but the question.

    Args:
        schemas: tools that the chat template shows.
        template_kwargs: variables of the chat template (``data.chat_template_kwargs``).

    Raises:
        ValueError: the chat template refuses the messages, or turns of a conversation would lose their roles.
    """
    if prompt_template is not None:
        if not isinstance(prompt, str) and len(prompt) > 1:
            raise ValueError(f"data.prompt_template takes one question, and a prompt has {len(prompt)} messages")
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return prompt_template.replace("{prompt}", question)

    messages = conversation(prompt, system_prompt, few_shot)
    if tokenizer.chat_template:
        try:
            return apply_template(tokenizer, messages, schemas=schemas, template_kwargs=template_kwargs)
        except Exception as error:  # a chat template is a program that comes with the model
            raise ValueError(f"the model's chat template refuses {str(messages)[:200]}: {error}") from error
    turns = [message for message in conversation(prompt, None, []) if message["role"] != "system"]
    if len(turns) > 1:
        raise ValueError(
            f"a prompt is a conversation of {len(turns)} turns, and the model has no chat template that would say "
            "who speaks: set model.chat_template=FILE"
        )
    return "\n\n".join(message["content"] for message in messages)


def apply_template(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    schemas: Sequence[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    begins_next_turn: bool = True,
    name: str | None = None,
) -> str:
    """The text of messages in the chat template, by default up to where the model's next turn begins.

    ``name``: of a tokenizer with several templates, the one to take; None: ``tool_use`` with schemas, else ``default``.
    """
    return tokenizer.apply_chat_template(
        list(messages),
        tools=list(schemas) if schemas else None,
        chat_template=name,
        tokenize=False,
        add_generation_prompt=begins_next_turn,
        **(template_kwargs or {}),
    )


def hidden_message(messages: Sequence[dict[str, Any]], text: str) -> dict[str, Any] | None:
    """The first message that a rendered ``text`` does not hold as it is, up to white space; None if it holds all.

    Some templates know no system prompt, others read no plain text. Earlier turns of the model may lose their thinking,
    and results of tools are often written as JSON: these are not compared.
    """
    shown = "".join(text.split())
    for message in messages:
        is_compared = message["role"] not in ("assistant", "tool")
        if is_compared and "".join(message["content"].split()) not in shown:
            return message
    return None


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts outside a chat template, each behind what the tokenizer puts before a text, such as BOS.

    A text that begins with it already, as a rendered prompt does, gets no second one. An EOS that the tokenizer would
    put behind is left out: a model cannot continue after it.
    """
    rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    before: list[int] = []
    for text, ids in zip(texts, rows, strict=True):
        if set(ids) - set(tokenizer.all_special_ids):  # any text with a word shows what the tokenizer adds
            with_special = tokenizer(text, verbose=False)["input_ids"]
            before = _added_before(with_special, ids)
            break
    encoded = []
    for ids in rows:
        begins_with_it = ids[: len(before)] == before
        encoded.append(ids if begins_with_it else before + ids)
    return encoded


def _added_before(with_special: list[int], ids: list[int]) -> list[int]:
    """The tokens in front of ``ids`` in ``with_special``."""
    for start in range(len(with_special)):
        end = start + len(ids)
        if with_special[start:end] == ids:
            return with_special[:start]
    return []


def special_tokens(tokenizer: Any) -> set[str]:
    """Every token that ``decode(..., skip_special_tokens=True)`` leaves out of a text."""
    special = set(tokenizer.all_special_tokens)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            special.add(str(token))
    return special


def marks_of_turns(tokenizer: Any) -> set[str]:
    """The marks that the chat template writes around a user's message, special tokens and plain text."""
    content = "\ue000"
    message = {"role": "user", "content": content}
    try:
        text = apply_template(tokenizer, [message], begins_next_turn=False)
    except Exception:  # a chat template is a program that comes with the model, and may ask for other messages
        return set()
    # The lines beside the message: a default system prompt further up may mention anything.
    before, _, after = text.partition(content)
    beside = before.rstrip().rpartition("\n")[2] + "\n" + after.lstrip().partition("\n")[0]
    marks = set(MARKS.findall(beside))
    for token in special_tokens(tokenizer):
        if token in beside:
            marks.add(token)
    return marks


def tag_tokens(tokenizer: Any) -> set[str]:
    """Special tokens in pairs, ``<think>`` and ``</think>``, that this tokenizer's template does not put around turns.

    In some published models the tags that a reward reads are special tokens.
    """
    special = special_tokens(tokenizer)
    tags = set()
    for closing in special:
        opening = closing.replace("/", "", 1)
        is_closing = closing.startswith(("</", "[/"))
        if is_closing and opening in special:
            tags |= {opening, closing}
    # <s> and </s> are a pair, too.
    return tags - _named_tokens(tokenizer) - marks_of_turns(tokenizer)


def _named_tokens(tokenizer: Any) -> set[str | None]:
    return {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}


class RenderedPrompts:
    """Tells prompts that a chat template has rendered already, and texts that hold special tokens otherwise."""

    def __init__(self, tokenizer: Any):
        controls = special_tokens(tokenizer) - tag_tokens(tokenizer)
        self.controls = _any_of(controls)
        # A question may be about <s>, <pad> or <filename>, but hardly about <|im_end|> or [INST].
        marks = marks_of_turns(tokenizer) | {token for token in controls if MARKS.fullmatch(token)}
        self.marks = _any_of({mark for mark in marks if not re.fullmatch(r"</?[a-z]{1,4}>", mark)})

    def mark_in(self, text: str) -> str | None:
        """The mark of a turn in a text, or the special token at its beginning; None: it is no rendered prompt."""
        found = self.marks.search(text) or self.controls.match(text.lstrip())
        return found and found[0]

    def special_in(self, text: str) -> str | None:
        """The first special token in a text that is no tag."""
        found = self.controls.search(text)
        return found and found[0]


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """A pattern that matches any of some texts, and nothing if there is none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

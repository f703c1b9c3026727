"""From a prompt to the text and the tokens that the model reads: chat template, special tokens,
BOS."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.config import DataConfig

Prompt = str | list[dict]
"""A text, or chat messages with ``role``, ``content`` and what else the chat template reads."""

MARKS = re.compile(r"<[|｜][^<>\s]+[|｜]>|\[/?[A-Z_]+\]|<\w+_of_\w+>")
"""Marks of turns in chat templates, special tokens or plain text: ``<|user|>``, ``[INST]``,
``<start_of_turn>``."""


def conversation(prompt: Prompt, config: DataConfig) -> list[dict]:
    """A prompt as chat messages: system prompt, worked examples, question."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    lead = []
    if messages[0]["role"] == "system":  # the system prompt of a row replaces the configured one
        lead.append(messages.pop(0))
    elif config.system_prompt:
        lead.append({"role": "system", "content": config.system_prompt})
    for example in config.few_shot:
        lead.append({"role": "user", "content": example["prompt"]})
        lead.append({"role": "assistant", "content": example["completion"]})
    return lead + messages


def render(
    prompt: Prompt,
    tokenizer: Any,
    config: DataConfig,
    schemas: Sequence[dict] = (),
) -> str:
    """The text that the model reads: system prompt, worked examples and question in the chat
    template.

    Without a chat template they are joined as plain text. A ``prompt_template`` replaces everything
    but the question.

    Args:
        schemas: tools that the chat template shows.

    Raises: ValueError: the chat template refuses the messages, or turns of a conversation would
        lose their roles.
    """
    messages = conversation(prompt, config)
    if tokenizer.chat_template and config.prompt_template is None:
        try:
            return apply_template(
                tokenizer,
                messages,
                schemas=schemas,
                template_kwargs=config.chat_template_kwargs,
            )
        except Exception as error:  # a chat template is a program that comes with the model
            raise ValueError(
                f"the model's chat template refuses {messages!s:.200}: {error}"
            ) from error

    if not isinstance(prompt, str) and len(prompt) > 1:
        raise ValueError(
            f"a prompt is a conversation of {len(prompt)} messages, and no chat template would say "
            "who speaks: set model.chat_template=FILE, without data.prompt_template"
        )
    if config.prompt_template is not None:
        return config.prompt_template.replace("{prompt}", messages[-1]["content"])
    return "\n\n".join(message["content"] for message in messages)


def apply_template(
    tokenizer: Any,
    messages: Sequence[dict],
    *,
    schemas: Sequence[dict] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    begins_next_turn: bool = True,
    name: str | None = None,
) -> str:
    """The text of messages in the chat template, by default up to where the model's next turn
    begins.

    ``name``: of a tokenizer with several templates, the one to take; None: ``tool_use`` with
    schemas, else ``default``."""
    return tokenizer.apply_chat_template(
        list(messages),
        tools=list(schemas) if schemas else None,
        chat_template=name,
        tokenize=False,
        add_generation_prompt=begins_next_turn,
        **(template_kwargs or {}),
    )


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts outside a chat template, each behind what the tokenizer puts before a
    text, such as BOS.

    A text that begins with it already, as a rendered prompt does, gets no second one. An EOS that
    the tokenizer would put behind is left out: a model cannot continue after it."""
    word = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_special = tokenizer("a")["input_ids"]
    before = with_special[: with_special.index(word[0])]
    encoded = []
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        begins_with_it = ids[: len(before)] == before
        encoded.append(ids if begins_with_it else before + ids)
    return encoded


def special_tokens(tokenizer: Any) -> set[str]:
    """Every token that ``decode(..., skip_special_tokens=True)`` leaves out of a text."""
    added = tokenizer.added_tokens_decoder.values()
    return {str(token) for token in added if token.special}


def marks_of_turns(tokenizer: Any) -> set[str]:
    """The marks that the chat template writes around a user's message."""
    try:
        text = apply_template(tokenizer, [{"role": "user", "content": "x"}])
    except (
        Exception
    ):  # a chat template is a program that comes with the model, and may ask for other messages
        return set()
    return set(MARKS.findall(text))


def tag_tokens(tokenizer: Any) -> set[str]:
    """Special tokens in pairs, ``<think>`` and ``</think>``, that this tokenizer's template does
    not put around turns.

    In some published models the tags that a reward reads are special tokens.
    """
    special = special_tokens(tokenizer)
    tags = set()
    for closing in special:
        opening = closing.replace("/", "", 1)
        if closing.startswith(("</", "[/")) and opening in special:
            tags |= {opening, closing}
    # <s> and </s> are a pair, too.
    return tags - {tokenizer.bos_token, tokenizer.eos_token} - marks_of_turns(tokenizer)

"""Turn prompts into the text and the tokens that the model reads, with its chat template and
special tokens."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.config import DataConfig

Prompt = str | list[dict]
"""A prompt: a text, or chat messages with ``role``, ``content`` and any other key that the chat
template reads."""

TURN_MARKER = re.compile(r"<[|｜][^<>\s]+[|｜]>|\[/?[A-Z_]+\]|<\w+_of_\w+>")
"""Pattern of the markers that chat templates write around messages: ``<|user|>``, ``[INST]``,
``<start_of_turn>``. A marker may be a special token or plain text."""


def conversation(prompt: Prompt, config: DataConfig) -> list[dict]:
    """Return a prompt as chat messages: system prompt, worked examples, question."""
    question = _as_messages(prompt, "user")

    # A system prompt in the row belongs to this problem, so it replaces the configured system
    # prompt. Many templates refuse two system messages.
    context = []
    if question[0]["role"] == "system":
        context.append(question.pop(0))
    elif config.system_prompt:
        context += _as_messages(config.system_prompt, "system")
    for example in config.few_shot:
        context += _as_messages(example["prompt"], "user")
        context += _as_messages(example["completion"], "assistant")
    return context + question


def _as_messages(value: Prompt, role: str) -> list[dict]:
    """Return a new list of messages. A text becomes one message of the role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return list(value)


def render(
    prompt: Prompt,
    tokenizer: Any,
    config: DataConfig,
    schemas: Sequence[dict] = (),
) -> str:
    """Return the text that the model reads: system prompt, worked examples and question in the chat
    template.

    Without a chat template, these parts are joined as plain text. With ``data.prompt_template``,
    the text is that template with the question filled in.

    Args:
        schemas: schemas of the tools that the chat template shows.

    Raises:
        ValueError: the chat template refuses the messages, or the prompt is a conversation and no
            chat template would write its roles.
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
        except Exception as error:
            # A chat template is a program that comes with the model: it may raise anything.
            raise ValueError(
                f"the model's chat template refuses {messages!s:.200}: {error}"
            ) from error

    # Joined as plain text, messages of a user and of a model would look alike.
    if not isinstance(prompt, str) and len(prompt) > 1:
        raise ValueError(
            f"a prompt is a conversation of {len(prompt)} messages, and no chat template would say "
            "who speaks: set model.chat_template=FILE, without data.prompt_template"
        )
    if config.prompt_template is not None:
        # str.format would take braces of code or LaTeX in the template for placeholders.
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
    """Return messages as text, rendered with the chat template.

    Args:
        begins_next_turn: True if the text ends with the header of the model's next message.
        name: name of the template, for a tokenizer with several templates. Default: ``tool_use`` if
            there are schemas, else ``default``.
    """
    # For an empty list, some templates would write a section about tools that lists no tool.
    return tokenizer.apply_chat_template(
        list(messages),
        tools=list(schemas) if schemas else None,
        chat_template=name,
        tokenize=False,
        add_generation_prompt=begins_next_turn,
        **(template_kwargs or {}),
    )


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts that are not rendered with a chat template.

    The ids begin with the special tokens that the tokenizer puts before a text, such as BOS. These
    tokens are not added to a text that already begins with them, such as a prompt that was rendered
    beforehand. An EOS that the tokenizer would put after a text is left out, because a model cannot
    continue after EOS.
    """
    # Tokenizers add BOS by a setting, by a post-processor, or in code. So the prefix is found by
    # encoding a short text with and without special tokens.
    word_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids_with_special = tokenizer("a")["input_ids"]
    prefix = ids_with_special[: ids_with_special.index(word_ids[0])]

    encoded = []
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        has_prefix = ids[: len(prefix)] == prefix
        encoded.append(ids if has_prefix else prefix + ids)
    return encoded


def special_tokens(tokenizer: Any) -> set[str]:
    """Return the special tokens, which ``decode(..., skip_special_tokens=True)`` leaves out of a
    text."""
    added = tokenizer.added_tokens_decoder.values()
    return {str(token) for token in added if token.special}


def turn_markers(tokenizer: Any) -> set[str]:
    """Return the markers that the chat template writes around a user's message."""
    try:
        text = apply_template(tokenizer, _as_messages("x", "user"))
    except Exception:
        # The template may demand other messages, such as a system prompt first. Then no markers are
        # known, and prompts are not checked for markers.
        return set()
    return set(TURN_MARKER.findall(text))


def tag_tokens(tokenizer: Any) -> set[str]:
    """Return special tokens in pairs, such as ``<think>`` and ``</think>``, without the markers
    that the chat template writes around messages.

    In some published models the tags that a reward reads are special tokens. Decoding must not drop
    these tags.
    """
    special = special_tokens(tokenizer)
    tags = set()
    for closing in special:
        opening = closing.replace("/", "", 1)
        if closing.startswith(("</", "[/")) and opening in special:
            tags |= {opening, closing}
    # <s> and </s> look like a pair of tags, but they are BOS and EOS.
    return tags - {tokenizer.bos_token, tokenizer.eos_token} - turn_markers(tokenizer)

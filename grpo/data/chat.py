"""Special tokens of a tokenizer: those with which a chat template marks turns, and tags that a model writes."""

from __future__ import annotations

import re
from typing import Any

MARKS = re.compile(r"<\|[^<>|\s]+\|>|\[/?[A-Z_]+\]|<\w+_of_\w+>")
"""Marks of turns that many chat templates write as plain text: ``<|user|>``, ``[INST]``, ``<start_of_turn>``."""


def special_tokens(tokenizer: Any) -> set[str]:
    """Every token that ``decode(..., skip_special_tokens=True)`` leaves out of a text."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}


def marks_of_turns(tokenizer: Any) -> set[str]:
    """What the chat template writes around a user's message: special tokens, and marks in plain text."""
    try:
        message = {"role": "user", "content": "x"}
        text = tokenizer.apply_chat_template([message], tokenize=False)
    except Exception:  # a chat template is a program that comes with the model, and may ask for other messages
        return set()
    found = {token for token in special_tokens(tokenizer) if token in text}
    return found | set(MARKS.findall(text))


def tag_tokens(tokenizer: Any) -> set[str]:
    """Special tokens that come in pairs, ``<think>`` and ``</think>``, and that no chat template puts around a turn.

    In some published models the tags that a reward reads are special tokens.
    """
    special = special_tokens(tokenizer)
    tags = set()
    for closing in special:
        opening = closing.replace("/", "", 1)
        is_closing = closing.startswith(("</", "[/"))
        if is_closing and opening in special:
            tags |= {opening, closing}
    ends = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    return tags - ends - marks_of_turns(tokenizer)


def control_tokens(tokenizer: Any) -> set[str]:
    """Tokens that no prompt holds unless a chat template has rendered it: all special ones but tags."""
    return (special_tokens(tokenizer) - tag_tokens(tokenizer)) | marks_of_turns(tokenizer)

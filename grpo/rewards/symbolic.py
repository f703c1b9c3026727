"""Rewards graded by the library ``math-verify``, imported only when one of them is used.

The library bounds its own time with SIGALRM, which works in a main thread only: in any other it would raise on every row (or, in
trainers that swallow that, score 0). The worker calls rewards in its main thread; elsewhere the library's own limits are off.
"""

import threading
from collections.abc import Sequence
from typing import Any

from grpo.rewards.builtin import column_values, is_missing, require_number
from grpo.rewards.extract import answers_equal, completion_text

PARSE_SECONDS = 3
"""The library's own limit per expression; ``reward.timeout_s`` holds above it."""


def _library() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ValueError(f"this reward needs the library math-verify ({error}): pip install -e '.[math]'") from None
    return math_verify


def _limits() -> int | None:
    return PARSE_SECONDS if threading.current_thread() is threading.main_thread() else None


def _parsed(library: Any, text: str) -> list[Any]:
    return library.parse(text, parsing_timeout=_limits())


def _parsed_gold(library: Any, gold: Any) -> list[Any]:
    # Gold answers come bare ("\frac{1}{2}") or inside a solution ("... \boxed{3}"); the library reads LaTeX only between
    # delimiters.
    text = str(gold)
    delimited = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    return _parsed(library, text if delimited else f"${text}$") or _parsed(library, text)


def math_verify(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    value: float = 1.0,
    column: str = "answer",
    **columns: Any,
) -> list[float | None]:
    """``value`` where the response's final expression equals the gold one symbolically, else 0.

    ``None`` where the gold answer is missing or cannot be parsed: the row says nothing about the response.
    """
    library = _library()
    require_number(value=value)
    rewards: list[float | None] = []
    for completion, gold in zip(completions, column_values(columns, column, completions, "math_verify"), strict=True):
        expected = [] if is_missing(gold) else _parsed_gold(library, gold)
        if not expected:
            rewards.append(None)
            continue
        found = _parsed(library, completion_text(completion))
        rewards.append(float(value) if library.verify(expected, found, timeout_seconds=_limits()) else 0.0)
    return rewards


def r1_zero(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    value: float = 1.0,
    format_value: float = 0.0,
    column: str = "answer",
    **columns: Any,
) -> list[float | None]:
    """The r1-zero scheme: the response (the prompt has opened ``<think>``) holds ``</think> <answer>`` and ``</answer>``.

    ``value`` for format and answer, ``format_value`` for the format alone, else 0. The answer is compared as a number or text
    first and by ``math-verify`` only where that fails. Source: "Understanding R1-Zero-Like Training" (arXiv 2503.20783).
    """
    library = _library()
    require_number(value=value, format_value=format_value)
    rewards: list[float | None] = []
    for completion, gold in zip(completions, column_values(columns, column, completions, "r1_zero"), strict=True):
        text = completion_text(completion)
        if is_missing(gold):
            rewards.append(None)
        elif "</think> <answer>" not in text or "</answer>" not in text:
            rewards.append(0.0)
        else:
            answer = text.split("<answer>")[-1].replace("</answer>", "")
            rewards.append(float(value if _same(library, answer, gold) else format_value))
    return rewards


def _same(library: Any, answer: str, gold: Any) -> bool:
    if answers_equal(answer, gold):
        return True
    if len(answer) > 1000:  # an essay is not an answer, and the library's time grows with it
        return False
    found = _parsed(library, answer if "\\boxed" in answer or "$" in answer else f"${answer.strip()}$")
    return bool(library.verify(_parsed_gold(library, gold), found, timeout_seconds=_limits()))


# One hard expression must not take its batch's time: the runner calls these row by row.
math_verify.row_by_row = True
r1_zero.row_by_row = True

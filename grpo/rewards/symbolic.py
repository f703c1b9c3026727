"""Rewards that compare mathematical expressions with the package ``math-verify``, which is imported only when one of them is used.

The package limits its own time with SIGALRM, which raises outside the main thread of a process. Worker processes call rewards in their
main thread; in other threads these rewards turn the package's limits off.
"""

import threading
from typing import Any

from grpo.rewards.arguments import Scores, column_values, is_missing, require_number, require_tag
from grpo.rewards.extract import after_thinking, answers_equal, completion_text, last_tag_content
from grpo.system import import_extra

MAX_ANSWER_LENGTH = 1000
"""Characters of the longest answer that ``r1_zero`` parses: the package's time grows with the length."""
PARSE_SECONDS = 3
"""The package's time limit per expression, in seconds. ``reward.timeout_s`` limits the whole call."""


def _timeout() -> int | None:
    return PARSE_SECONDS if threading.current_thread() is threading.main_thread() else None


def _parse(library: Any, text: str) -> list[Any]:
    return library.parse(text, parsing_timeout=_timeout())


def _parse_answer(library: Any, text: str) -> list[Any]:
    # The package reads LaTeX only between delimiters, and an answer may be LaTeX without them ("\frac{1}{2}").
    text = text.strip()
    has_delimiters = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    return _parse(library, text if has_delimiters else f"${text}$") or _parse(library, text)


def math_verify(prompts, completions, *, value=1.0, tag=None, column="answer", **columns) -> Scores:
    """``value`` where the answer of the response equals the reference answer symbolically, else 0.

    Text inside ``<think>`` is never read. The answer is the text inside the last ``<answer>...</answer>`` after the thinking, or without
    one the final expression after the thinking. With ``tag``, only the text inside the last ``<tag>...</tag>`` is read.

    ``None`` where the reference answer is missing or cannot be parsed.
    """
    library = import_extra("math_verify", "math", "reward 'math_verify'")
    require_number(value=value)
    if tag is not None:
        require_tag(tag)
    rewards: Scores = []
    for completion, reference in zip(
        completions, column_values(columns, column, completions, "math_verify"), strict=True
    ):
        expected = [] if is_missing(reference) else _parse_answer(library, str(reference))
        if not expected:
            rewards.append(None)
            continue
        response = after_thinking(completion_text(completion))
        answer = last_tag_content(response, tag or "answer")
        has_tag = answer is not None or tag is not None
        found = _parse_answer(library, answer or "") if has_tag else _parse(library, response)
        rewards.append(float(value) if library.verify(expected, found, timeout_seconds=_timeout()) else 0.0)
    return rewards


def r1_zero(prompts, completions, *, value=1.0, format_value=0.0, column="answer", **columns) -> Scores:
    """The r1-zero reward: ``value`` for format and answer, ``format_value`` for the format alone, else 0.

    The format is ``</think> <answer>`` and ``</answer>`` in the response; the prompt ends with ``<think>``. The answer is compared as a
    number or text first, and by ``math-verify`` if that comparison fails. Source: "Understanding R1-Zero-Like Training" (arXiv
    2503.20783).
    """
    library = import_extra("math_verify", "math", "reward 'r1_zero'")
    require_number(value=value, format_value=format_value)
    rewards: Scores = []
    for completion, reference in zip(completions, column_values(columns, column, completions, "r1_zero"), strict=True):
        text = completion_text(completion)
        if is_missing(reference):
            rewards.append(None)
        elif "</think> <answer>" not in text or "</answer>" not in text:
            rewards.append(0.0)
        else:
            answer = text.split("<answer>")[-1].replace("</answer>", "")
            rewards.append(float(value if _is_equal(library, answer, reference) else format_value))
    return rewards


def _is_equal(library: Any, answer: str, reference: Any) -> bool:
    if answers_equal(answer, reference):
        return True
    if len(answer) > MAX_ANSWER_LENGTH:
        return False
    found = _parse_answer(library, answer)
    return bool(library.verify(_parse_answer(library, str(reference)), found, timeout_seconds=_timeout()))


# The runner calls these functions row by row, so that one slow expression does not use up the time limit of its batch.
math_verify.row_by_row = r1_zero.row_by_row = True

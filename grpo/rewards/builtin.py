"""The built-in rewards that read only the text and the columns: ``B`` completions in, ``B`` numbers out.

Signature: ``fn(prompts, completions, *, <arguments>, **columns) -> list[float | None]``; prompts and completions are texts or lists of
messages. The keyword-only parameters are the arguments that a configuration sets (``args:``), with their published values as defaults.
Each function checks its arguments before any row, so a call without rows checks a configuration.
"""

import re
from typing import Any

from grpo.rewards import completion_text
from grpo.rewards.arguments import Scores, column_values, is_missing, require_bool, require_number, require_tag
from grpo.rewards.expression import solves_countdown
from grpo.rewards.extract import (
    answers_equal,
    compile_pattern,
    extract_answer,
    has_format,
    matched_group,
    tag_content,
)
from grpo.rewards.notation import equal_in_any_notation, last_number

TAGS_PATTERN = r"(<think>)|(</think>)|(<answer>)|(</answer>)(\s*\Z)?"
"""Five groups: one for each tag, and one that matches if nothing follows the last tag."""


def accuracy(
    prompts, completions, *, mode="strict", value=1.0, tag="answer", any_notation=False, column="answer", **columns
) -> Scores:
    """``value`` where the answer equals the reference answer (as a number, else as normalised text), and 0 elsewhere.

    ``mode`` says where the answer is: ``strict`` (in the only ``<tag>...</tag>``), ``lenient`` (the last number), ``boxed`` (in the last
    ``\\boxed{...}``) or ``####`` (behind the last ``####``); see :func:`extract_answer`. With ``any_notation`` a number is also read with a
    unit, Markdown or LaTeX around it, as ``x = 5``, as ``\\frac{1}{2}`` and as ``2 1/2``; see :mod:`grpo.rewards.notation`.
    """
    extract_answer("", mode, tag)
    require_bool(any_notation=any_notation)
    require_number(value=value)
    require_tag(tag)
    rewards: Scores = []
    for completion, reference in zip(completions, column_values(columns, column, completions, "accuracy"), strict=True):
        if is_missing(reference):
            rewards.append(None)
            continue
        is_right = _is_right(completion_text(completion), reference, mode, tag, any_notation)
        rewards.append(float(value) if is_right else 0.0)
    return rewards


def _is_right(text: str, reference: Any, mode: str, tag: str, any_notation: bool) -> bool:
    without_context = any_notation and mode == "lenient"
    answer = last_number(text) if without_context else extract_answer(text, mode, tag)
    if answer is None or not any_notation:
        return answer is not None and answers_equal(answer, reference)
    return equal_in_any_notation(answer, reference, bare=without_context)


def format(prompts, completions, *, pattern=None, value=1.0, **columns) -> Scores:
    """``value`` where the whole response matches ``pattern`` (DOTALL, fullmatch), else 0.

    The default is ``<think> ... </think> <answer> ... </answer>`` with each tag exactly once (DeepSeek-R1). A pattern that backtracks
    for too long is stopped by ``reward.timeout_s``, like any slow reward.
    """
    compiled = None if pattern is None else compile_pattern(pattern)
    require_number(value=value)
    return [float(value) if has_format(completion_text(c), compiled) else 0.0 for c in completions]


def tag_groups(prompts, completions, *, pattern=TAGS_PATTERN, per_group=0.1, max_value=0.5, **columns) -> Scores:
    """``per_group`` for each group of ``pattern`` that matches anywhere in the response, at most ``max_value`` in total.

    A group counts once however often it matches, so repeating a tag earns nothing. Source of the values (0.1 and 0.5): "The One Big
    Beautiful Blog on GRPO".
    """
    compiled = compile_pattern(pattern)
    require_number(per_group=per_group, max_value=max_value)
    if not compiled.groups:
        raise ValueError(f"tag_groups counts the groups of its pattern, and {pattern!r} has none")

    def num_matched_groups(text: str) -> int:
        matches = [match.groups() for match in compiled.finditer(text)]
        return sum(any(found is not None for found in group) for group in zip(*matches, strict=True))

    return [min(per_group * num_matched_groups(completion_text(c)), float(max_value)) for c in completions]


def pattern_answer(
    prompts, completions, *, pattern: str, value=1.0, group="answer", column="answer", **columns
) -> Scores:
    """``value`` where the whole response matches ``pattern`` (DOTALL, fullmatch) and its group ``(?P<answer>...)`` is the reference answer.

    The text of the group is compared as a number, or as normalised text where it is none. ``group`` names another group. A pattern that
    backtracks for too long is stopped by ``reward.timeout_s``.
    """
    compiled = _pattern_with_group(pattern, group)
    require_number(value=value)
    rewards: Scores = []
    for completion, reference in zip(
        completions, column_values(columns, column, completions, "pattern_answer"), strict=True
    ):
        answer = matched_group(completion_text(completion), compiled, group)
        is_right = answer is not None and answer.strip() != "" and answers_equal(answer, reference)
        rewards.append(None if is_missing(reference) else float(value) if is_right else 0.0)
    return rewards


def _pattern_with_group(pattern: Any, group: Any) -> re.Pattern[str]:
    compiled = compile_pattern(pattern)
    if not isinstance(group, str) or group not in compiled.groupindex:
        raise ValueError(
            f"the answer is read from a group of the pattern, (?P<{group}>...), and {pattern!r} has no group of that name"
        )
    return compiled


def exact_or_stripped(
    prompts, completions, *, exact=3.0, stripped=1.5, tag="answer", pattern=None, column="answer", **columns
) -> Scores:
    """``exact`` where the text inside the tag is the reference answer, ``stripped`` where it differs in surrounding white space, else 0.

    With ``pattern``, the text is the group ``(?P<answer>...)`` of that pattern, which the whole response must match, and ``tag`` is not used.
    Source of the values: "The Illustrated GRPO" and its Gemma 3 recipe (3.0 and 1.5, tag ``SOLUTION``).
    """
    require_number(exact=exact, stripped=stripped)
    require_tag(tag)
    compiled = None if pattern is None else _pattern_with_group(pattern, "answer")
    rewards: Scores = []
    references = column_values(columns, column, completions, "exact_or_stripped")
    for completion, reference in zip(completions, references, strict=True):
        text = completion_text(completion)
        content = tag_content(text, tag) if compiled is None else matched_group(text, compiled, "answer")
        if is_missing(reference):
            rewards.append(None)
        elif content == str(reference):
            rewards.append(float(exact))
        else:
            rewards.append(
                float(stripped) if content is not None and content.strip() == str(reference).strip() else 0.0
            )
    return rewards


def soft_overlong(prompts, completions, completion_ids, *, max_length: int, cache_length: int, **columns) -> Scores:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13, with 20480 and 4096 tokens).

    0 for up to ``max_length - cache_length`` tokens, then a linear decrease to -1 at ``max_length``, and -1 beyond.
    """
    require_number(max_length=max_length, cache_length=cache_length)
    if not 0 < cache_length <= max_length:
        raise ValueError(f"soft_overlong needs 0 < cache_length <= max_length, got {cache_length} and {max_length}")
    free_length = max_length - cache_length
    return [max(-1.0, min(0.0, (free_length - len(ids)) / cache_length)) for ids in completion_ids]


def countdown(
    prompts, completions, *, value=1.0, format_value=0.0, tag="answer", numbers_column="numbers",
    target_column="target", **columns,
) -> Scores:  # fmt: skip
    """``value`` where the expression in the tag uses each number of the row exactly once and equals the row's target.

    ``format_value`` (TinyZero: 0.1) where the tag contains anything else, 0 without a tag. An equation such as ``(3 + 5) * 3 = 24`` is
    read as its left side if its right side is the value of that side.
    """
    require_number(value=value, format_value=format_value)
    require_tag(tag)
    numbers = column_values(columns, numbers_column, completions, "countdown")
    targets = column_values(columns, target_column, completions, "countdown")
    rewards: Scores = []
    for completion, row_numbers, target in zip(completions, numbers, targets, strict=True):
        content = extract_answer(completion_text(completion), "strict", tag)
        if row_numbers is None or is_missing(target):
            rewards.append(None)
        elif content is None:
            rewards.append(0.0)
        else:
            rewards.append(float(value if solves_countdown(content, row_numbers, target) else format_value))
    return rewards

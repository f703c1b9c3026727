"""The built-in rewards that need nothing but the text (``B`` completions in, ``B`` numbers out).

Signature: ``fn(prompts, completions, *, <arguments>, **columns) -> list[float | None]``. The keyword-only parameters are the
arguments of the configuration (``args:``), with their published values as defaults; ``None`` marks a row that cannot be scored.
Arguments are checked before any row is looked at, so that calling with no rows checks a configuration.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from grpo.rewards.expression import evaluate_expression
from grpo.rewards.extract import (
    answers_equal,
    compile_pattern,
    completion_text,
    extract_answer,
    has_format,
    parse_number,
    tag_content,
)

TAGS_PATTERN = r"(<think>)|(</think>)|(<answer>)|(</answer>)(\s*\Z)?"
"""Five groups: each tag, and that nothing follows the last one."""


def column_values(columns: dict[str, Any], name: str, completions: Sequence[Any], reward: str) -> Sequence[Any]:
    """The column ``name``, one value per completion.

    Raises:
        ValueError: if the rows have no such column; the message lists those they have.
    """
    if name in columns:
        return columns[name]
    if not completions:
        return []
    raise ValueError(f"reward {reward!r} needs the column {name!r}; the rows have {sorted(columns)}")


def require_number(**arguments: Any) -> None:
    """Raise ``ValueError`` naming the first argument that is not a finite number."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a number, got {value!r}")


def require_tag(tag: Any) -> None:
    """Raise ``ValueError`` unless ``tag`` is the bare name of a tag."""
    if not isinstance(tag, str) or not tag or set(tag) & set("<>/ "):
        raise ValueError(f"tag must be a bare name such as 'answer' (no angle brackets), got {tag!r}")


def is_missing(gold: Any) -> bool:
    """A row without a gold answer (absent, empty) is unscorable, not wrong."""
    return gold is None or (isinstance(gold, str) and not gold.strip())


def accuracy(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    mode: str = "strict",
    value: float = 1.0,
    tag: str = "answer",
    column: str = "answer",
    **columns: Any,
) -> list[float | None]:
    """``value`` where the answer equals the gold one, else 0: numerically after normalising, or as normalised text.

    ``mode="strict"`` reads the one ``<tag>...</tag>``; ``"lenient"`` the last number of the response.
    """
    extract_answer("", mode, tag)
    require_number(value=value)
    require_tag(tag)
    rewards: list[float | None] = []
    for completion, gold in zip(completions, column_values(columns, column, completions, "accuracy"), strict=True):
        if is_missing(gold):
            rewards.append(None)
            continue
        answer = extract_answer(completion_text(completion), mode, tag)
        rewards.append(float(value) if answer is not None and answers_equal(answer, gold) else 0.0)
    return rewards


def format(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    pattern: str | None = None,
    value: float = 1.0,
    **columns: Any,
) -> list[float]:
    """``value`` where the whole response matches ``pattern`` (DOTALL, fullmatch), else 0.

    Without a pattern: ``<think> ... </think> <answer> ... </answer>``, each tag exactly once (DeepSeek-R1). A pattern that
    backtracks without end is stopped by the worker's timeout, like any other reward.
    """
    compiled = None if pattern is None else compile_pattern(pattern)
    require_number(value=value)
    return [float(value) if has_format(completion_text(c), compiled) else 0.0 for c in completions]


def tag_groups(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    pattern: str = TAGS_PATTERN,
    per_group: float = 0.1,
    max_value: float = 0.5,
    **columns: Any,
) -> list[float]:
    """``per_group`` for each distinct group of ``pattern`` that matches somewhere, at most ``max_value`` in all.

    A group counts once however often it matches, so that repeating a tag earns nothing. Values: "The One Big Beautiful Blog on
    GRPO" (0.1 each, 0.5 at most).
    """
    compiled = compile_pattern(pattern)
    require_number(per_group=per_group, max_value=max_value)
    if not compiled.groups:
        raise ValueError(f"tag_groups counts the groups of its pattern, and {pattern!r} has none")

    def matched_groups(text: str) -> int:
        seen: set[int] = set()
        for match in compiled.finditer(text):
            seen.update(number for number, group in enumerate(match.groups(), 1) if group is not None)
        return len(seen)

    return [min(per_group * matched_groups(completion_text(c)), float(max_value)) for c in completions]


def exact_or_stripped(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    exact: float = 3.0,
    stripped: float = 1.5,
    tag: str = "answer",
    column: str = "answer",
    **columns: Any,
) -> list[float | None]:
    """``exact`` where the text inside the tag is the gold answer, ``stripped`` where it is up to white space around it, else 0.

    Values: "The Illustrated GRPO" and its Gemma 3 recipe (3.0 and 1.5, tag ``SOLUTION``).
    """
    require_number(exact=exact, stripped=stripped)
    require_tag(tag)
    rewards: list[float | None] = []
    golds = column_values(columns, column, completions, "exact_or_stripped")
    for completion, gold in zip(completions, golds, strict=True):
        content = tag_content(completion_text(completion), tag)
        if is_missing(gold):
            rewards.append(None)
        elif content == str(gold):
            rewards.append(float(exact))
        else:
            rewards.append(float(stripped) if content is not None and content.strip() == str(gold).strip() else 0.0)
    return rewards


def soft_overlong(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int,
    cache_length: int,
    **columns: Any,
) -> list[float]:
    """DAPO's soft overlong punishment, in tokens (arXiv 2503.14476, equation 13; there 20480 and 4096).

    0 up to ``max_length - cache_length`` tokens, then falling linearly to -1 at ``max_length``, -1 beyond.
    """
    require_number(max_length=max_length, cache_length=cache_length)
    if not 0 < cache_length <= max_length:
        raise ValueError(f"soft_overlong needs 0 < cache_length <= max_length, got {cache_length} and {max_length}")
    expected = max_length - cache_length
    return [max(-1.0, min(0.0, (expected - len(ids)) / cache_length)) for ids in completion_ids]


def countdown(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    value: float = 1.0,
    format_value: float = 0.0,
    tag: str = "answer",
    numbers_column: str = "numbers",
    target_column: str = "target",
    **columns: Any,
) -> list[float | None]:
    """``value`` where the expression in the tag uses each of the row's numbers exactly once and equals its target.

    ``format_value`` (TinyZero: 0.1) for a tag that holds something else. ``(3 + 5) * 3 = 24`` counts as its left side when the
    right side is true.
    """
    require_number(value=value, format_value=format_value)
    require_tag(tag)
    numbers = column_values(columns, numbers_column, completions, "countdown")
    targets = column_values(columns, target_column, completions, "countdown")
    rewards: list[float | None] = []
    for completion, row_numbers, target in zip(completions, numbers, targets, strict=True):
        content = extract_answer(completion_text(completion), "strict", tag)
        if row_numbers is None or is_missing(target):
            rewards.append(None)
        elif content is None:
            rewards.append(0.0)
        else:
            rewards.append(float(value if _solves(content, row_numbers, target) else format_value))
    return rewards


def _solves(content: str, numbers: Iterable[Any], target: Any) -> bool:
    expression, equals, claimed = content.partition("=")
    goal = parse_number(str(target))
    if goal is None:
        raise ValueError(f"the target of a countdown row must be a number, got {target!r}")
    try:
        result, used = evaluate_expression(expression)
    except ValueError:
        return False
    if equals and parse_number(claimed) != result:
        return False
    return result == goal and sorted(used) == sorted(int(Fraction(str(number))) for number in numbers)

"""Checks of arguments and columns that the built-in rewards share. Each raises a ``ValueError`` of one line."""

import math
from collections.abc import Collection, Sequence
from typing import Any

Scores = list[float | None]
"""One reward per completion. ``None`` marks a row that cannot be scored."""


def check_columns(reward: str, needed: Collection[str], available: Collection[str]) -> None:
    """Check that the rows have every column that a reward needs."""
    missing = sorted(set(needed) - set(available))
    if missing:
        existing = ", ".join(sorted(available)) or "none"
        raise ValueError(f"reward {reward!r} needs the column(s) {', '.join(missing)}; the rows have {existing}")


def column_values(columns: dict[str, Any], name: str, completions: Sequence[Any], reward: str) -> Sequence[Any]:
    """The column ``name``, one value per completion. Without completions the column may be missing."""
    if completions:
        check_columns(reward, [name], columns)
    return columns.get(name, [])


def require_number(**arguments: Any) -> None:
    """Check that every argument is a finite number."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a number, got {value!r}")


def require_tag(tag: Any) -> None:
    """Check that ``tag`` is the name of a tag without its angle brackets."""
    if not isinstance(tag, str) or not tag or set(tag) & set("<>/ "):
        raise ValueError(f"tag must be a bare name such as 'answer' (no angle brackets), got {tag!r}")


def is_missing(reference: Any) -> bool:
    """True if a row has no reference answer (``None`` or blank text): its completions cannot be scored."""
    return reference is None or (isinstance(reference, str) and not reference.strip())

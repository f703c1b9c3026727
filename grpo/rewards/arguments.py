"""Checks of arguments and columns that the built-in rewards share."""

import math
from collections.abc import Collection, Sequence
from typing import Any


def check_columns(reward: str, needed: Collection[str], available: Collection[str]) -> None:
    """Check that the rows have every column that a reward needs.

    Raises:
        ValueError: in one line that lists the missing columns and those that the rows have.
    """
    missing = sorted(set(needed) - set(available))
    if missing:
        raise ValueError(
            f"reward {reward!r} needs the column(s) {', '.join(missing)}; the rows have {', '.join(sorted(available)) or 'none'}"
        )


def column_values(columns: dict[str, Any], name: str, completions: Sequence[Any], reward: str) -> Sequence[Any]:
    """The column ``name``, one value per completion. Without completions the column may be missing.

    Raises:
        ValueError: if the rows have no such column.
    """
    if completions:
        check_columns(reward, [name], columns)
    return columns.get(name, [])


def require_number(**arguments: Any) -> None:
    """Raise ``ValueError`` with the name of the first argument that is not a finite number."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a number, got {value!r}")


def require_tag(tag: Any) -> None:
    """Raise ``ValueError`` unless ``tag`` is the name of a tag without its angle brackets."""
    if not isinstance(tag, str) or not tag or set(tag) & set("<>/ "):
        raise ValueError(f"tag must be a bare name such as 'answer' (no angle brackets), got {tag!r}")


def is_missing(gold: Any) -> bool:
    """Whether a row has no gold answer (``None`` or blank text). Such a row cannot be scored; its completions are not wrong."""
    return gold is None or (isinstance(gold, str) and not gold.strip())

"""Secrets, such as a reward's ``api_key``: masked wherever a run writes, or taken from the environment.

A reference ``${NAME}`` is written as it is, and replaced by the value of that environment variable when it is used.
"""

import os
import re
from collections.abc import Callable
from typing import Any

MASK = "***"
_SECRET = re.compile(
    r"(^|_)(secrets?|password|passwd|passphrase|pwd|auth|authorization|bearer|cookie|jwt|credentials?|pat|api_?keys?)"
    r"(_|$)"
)
_KEY = re.compile(r"(?<![a-z])(?:([a-z]+)_)?(?<![a-z])(?:keys?|tokens?)(?=_|$)(?!_(?:column|field|budget|limit))")
_HARMLESS = re.compile(
    "answer|stop|start|end|think|special|[bes]os|pad|unk|mask|max|min|num|count|"
    "json|sort|group|column|row|data|dict|field|reward|target|score|label"
)
_IN_TEXT = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)|^((?:Bearer|Basic|Token) )\S+$")
_MASKED = re.compile(r"://[^/\s:@]*:\*\*\*@|^(Bearer|Basic|Token) \*\*\*$")
_REFERENCE = re.compile(r"((?:Bearer |Basic |Token )?)\$\{([A-Z_][A-Z0-9_]*)\}")


def names_a_secret(name: str) -> bool:
    """True for ``api_key``, ``apiKey``, ``hf_token_2``, ``db_password``; not for ``max_tokens`` or ``stop_token``."""
    name = _words(name)
    is_key = any(not _HARMLESS.fullmatch(found[1] or "") for found in _KEY.finditer(name))
    return is_key or _SECRET.search(name) is not None


def _words(name: str) -> str:
    return "_".join(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def masked(values: Any) -> Any:
    """A copy of nested values in which every secret is replaced by :data:`MASK`."""

    def mask(key: str, value: Any, is_secret: bool) -> Any:
        if isinstance(value, str) and _REFERENCE.fullmatch(value):
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # many a token is a count
        if is_secret and (isinstance(value, str) or (is_number and _SECRET.search(_words(key)))):
            return MASK
        return _IN_TEXT.sub(lambda found: (found[1] or found[2]) + MASK, value) if isinstance(value, str) else value

    return _map(values, mask)


def with_environment(values: Any, where: str) -> Any:
    """A copy of nested values in which ``${NAME}`` and ``Bearer ${NAME}`` have the value of that environment variable.

    ValueError, which begins with ``where``: a variable is not set, or a secret was masked when it was written.
    """

    def resolve(key: str, value: Any, is_secret: bool) -> Any:
        is_text = isinstance(value, str)
        if (is_secret and value == MASK) or (is_text and _MASKED.search(value)):
            raise ValueError(f"{where}: {key} was masked when it was written: set it again, or to ${{NAME}}")
        reference = _REFERENCE.fullmatch(value) if is_text else None
        if reference is None:
            return value
        if reference[2] not in os.environ:
            raise ValueError(f"{where}: the environment variable {reference[2]} of {value} is not set")
        return reference[1] + os.environ[reference[2]]

    return _map(values, resolve)


def _map(value: Any, function: Callable[[str, Any, bool], Any], key: str = "", is_secret: bool = False) -> Any:
    """Apply ``function(dotted key, value, is it secret)`` to every value in nested dictionaries and lists."""
    if isinstance(value, dict):
        prefix = f"{key}." if key else ""
        return {k: _map(v, function, f"{prefix}{k}", is_secret or names_a_secret(str(k))) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, function, key, is_secret) for item in value]
    return function(key, value, is_secret)

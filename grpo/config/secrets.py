"""Secrets, such as a reward's ``api_key``: masked wherever a run writes, or taken from the
environment.

A reference ``${NAME}`` is written as it is, and replaced by the value of that environment variable
when it is used."""

import os
import re
from typing import Any

MASK = "***"
_SECRET = re.compile(
    "keys?|apikey|token|secrets?|password|passwd|passphrase|pwd|auth|authorization|bearer|cookie|credentials?|jwt|pat"
)
"""A word that makes a name that of a secret. ``tokens`` are counted."""
_HARMLESS = re.compile(
    "answer|stop|start|end|think|special|[bes]os|sep|pad|unk|mask|max|min|num|count|json|sort|group|column|row|data|"
    "dict|field|reward|target|score|label|budget|limit"
)
"""A word that makes a key or token beside it harmless: ``stop_token``, ``answer_key``."""
_REFERENCE = re.compile(r"((?:Bearer |Basic |Token )?)\$\{([A-Z_][A-Z0-9_]*)\}")


def names_a_secret(name: str) -> bool:
    """True for ``api_key``, ``apiKey``, ``hf_token_2``, ``db_password``; not for ``max_tokens`` or
    ``stop_token``."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    words = [word.lower() for word in found]
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        # A neighbour makes only these harmless: a password is one whatever stands beside it.
        is_weak = word in ("key", "keys", "token")
        is_harmless = is_weak and (_HARMLESS.fullmatch(before) or _HARMLESS.fullmatch(after))
        if _SECRET.fullmatch(word) and not is_harmless:
            return True
    return False


def masked(value: Any, is_secret: bool = False) -> Any:
    """A copy of nested values in which :data:`MASK` replaces the values whose names are those of
    secrets."""
    if isinstance(value, dict):
        return {
            name: masked(inner, is_secret or names_a_secret(str(name)))
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(inner, is_secret) for inner in value]
    is_harmless = value is None or isinstance(value, bool) or _REFERENCE.fullmatch(str(value))
    return MASK if is_secret and not is_harmless else value


def with_environment(value: Any, where: str, name: str = "") -> Any:
    """A copy of nested values in which ``${NAME}`` and ``Bearer ${NAME}`` have the value of that
    environment variable.

    ValueError, which begins with ``where``: a variable is not set, or a secret was masked when it
    was written."""
    if isinstance(value, dict):
        found = {}
        for key, inner in value.items():
            # A secret has all that is in it masked.
            found[key] = with_environment(inner, where, name if names_a_secret(name) else str(key))
        return found
    if isinstance(value, list | tuple):
        return [with_environment(inner, where, name) for inner in value]
    if value == MASK and names_a_secret(name):
        raise ValueError(
            f"{where}: {name} was masked when it was written: set it again, or to ${{NAME}}"
        )
    reference = _REFERENCE.fullmatch(str(value))
    if reference is None:
        return value
    prefix, variable = reference.groups()
    if variable not in os.environ:
        raise ValueError(f"{where}: the environment variable {variable} of {value} is not set")
    return prefix + os.environ[variable]

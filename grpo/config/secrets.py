"""Secrets in a configuration, such as a reward's ``api_key``: masked wherever a run writes, or taken from the environment when used.

A text is secret if the name of its key says so, or if it is the value of an Authorization header or has a password in a URL. A reference
``${NAME}`` to an environment variable is no secret: it is written as it is, and replaced by the variable's value when it is used.
"""

import os
import re
from collections.abc import Callable
from typing import Any

MASK = "***"
_SECRET = re.compile(
    r"(^|_)(secrets?|password|passwd|passphrase|pwd|credentials?|authorization|bearer|cookie|pat|(api|access|private|auth)_?keys?)(_|$)"
)
_COUNT, _KEY_OR_TOKEN = re.compile(r"(^|_)(num|max|min|count)(_|$)"), re.compile(r"(^|_)(key|token)s?(_|$)")
_LOOKS_RANDOM = re.compile(r"(?=\S*\d)\S{8,}")
_HEADER = re.compile(r"(Bearer|Basic|Token) \S+")
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_REFERENCE = re.compile(r"((?:Bearer |Basic |Token )?)\$\{([A-Z_][A-Z0-9_]*)\}")


def masked(values: Any) -> Any:
    """A copy of nested values in which every secret is replaced by :data:`MASK`."""

    def mask(value: Any, is_secret: bool) -> Any:
        if is_secret and value is not None and not isinstance(value, bool):
            return MASK
        return _URL_PASSWORD.sub(rf"\g<1>{MASK}@", value) if isinstance(value, str) else value

    return _map(values, mask)


def with_environment(values: Any, where: str) -> Any:
    """A copy of nested values in which each text ``${NAME}`` or ``Bearer ${NAME}`` has the value of that environment variable.

    Raises:
        ValueError: in one line that begins with ``where``, if a variable is not set, or if a secret was masked when it was written.
    """

    def resolve(value: Any, is_secret: bool) -> Any:
        if (is_secret and value == MASK) or (isinstance(value, str) and f":{MASK}@" in value):
            reason = "a secret was masked when the configuration was written"
            raise ValueError(f"{where}: {reason}: give it again, or write ${{NAME}}")
        reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if reference is None:
            return value
        if reference[2] not in os.environ:
            raise ValueError(f"{where}: the environment variable {reference[2]} of {value} is not set")
        return reference[1] + os.environ[reference[2]]

    return _map(values, resolve)


def _map(value: Any, function: Callable[[Any, bool], Any], is_secret: bool = False) -> Any:
    """Apply ``function(value, is it secret)`` to every value in nested dictionaries and lists."""
    if isinstance(value, dict):
        return {key: _map(item, function, is_secret or _names_a_secret(str(key), item)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, function, is_secret) for item in value]
    is_header = isinstance(value, str) and _HEADER.fullmatch(value)
    is_reference = isinstance(value, str) and _REFERENCE.fullmatch(value)
    return function(value, bool(is_secret or is_header) and not is_reference)


def is_secret(name: str, value: Any) -> bool:
    """True for a value that :func:`masked` masks under this name."""
    return masked({name: value})[name] == MASK


def _names_a_secret(key: str, value: Any) -> bool:
    """True for ``api_key``, ``apiKey``, ``hf_token_2``, ``db_password``; not for ``max_tokens`` or ``stop_token``.

    Many a key or token is no secret (``answer_key: final``, ``stop_token: </s>``). It is taken for one if the kind of key says so, or if
    the text has a digit, no white space and at least 8 characters.
    """
    name = "_".join(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key))
    if _COUNT.search(name):
        return False
    looks_random = isinstance(value, str) and _LOOKS_RANDOM.fullmatch(value)
    return bool(_SECRET.search(name) or (looks_random and _KEY_OR_TOKEN.search(name)))

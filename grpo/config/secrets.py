"""Secrets, such as the ``api_key`` of a reward: masked wherever a run writes, or taken from the
environment.

A reference ``${NAME}`` to an environment variable is written unchanged. The value of the variable
replaces the reference when the reward functions are set up.
"""

import os
import re
from typing import Any

MASK = "***"
_SECRET = re.compile(
    # `tokens` is missing: in names such as max_tokens, tokens are counted.
    "keys?|apikey|token|secrets?|password|passwd|passphrase|pwd|auth|authorization|bearer|cookie|"
    "credentials?|jwt|pat"
)
"""Words that mark a name as that of a secret, such as ``key`` in ``api_key``."""
_HARMLESS_NEIGHBOUR = re.compile(
    "answer|stop|start|end|think|special|[bes]os|sep|pad|unk|mask|max|min|num|count|json|sort|"
    "group|column|row|data|dict|field|reward|target|score|label|budget|limit"
)
"""Words beside which ``key`` and ``token`` mean no secret: ``answer_key``, ``stop_token``."""
_REFERENCE = re.compile(r"((?:Bearer |Basic |Token )?)\$\{([A-Z_][A-Z0-9_]*)\}")
"""Reference ``${NAME}`` to an environment variable. The scheme of an Authorization header may
precede it: ``Bearer ${NAME}``."""


def names_a_secret(name: str) -> bool:
    """True if a name is that of a secret: ``api_key``, ``apiKey``, ``hf_token_2``, ``db_password``.
    False for ``max_tokens`` and ``stop_token``."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    words = [word.lower() for word in words]
    for index, word in enumerate(words):
        if not _SECRET.fullmatch(word):
            continue
        # A neighbour makes only `key`, `keys` and `token` harmless. A password stays a secret
        # beside any word.
        is_weak = word in ("key", "keys", "token")
        neighbours = words[max(index - 1, 0) : index + 2]
        if not (is_weak and any(map(_HARMLESS_NEIGHBOUR.fullmatch, neighbours))):
            return True
    return False


def masked(value: Any, is_secret: bool = False) -> Any:
    """Return a copy of nested values in which :data:`MASK` replaces the values of secrets.

    Args:
        is_secret: True if ``value`` lies below the name of a secret. Everything in ``value`` is
            then masked.
    """
    if isinstance(value, dict):
        return {
            name: masked(inner, is_secret or names_a_secret(str(name)))
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(inner, is_secret) for inner in value]
    # A reference ${NAME} must stay: a run that starts from the written configuration reads the
    # variable again.
    is_harmless = value is None or isinstance(value, bool) or _REFERENCE.fullmatch(str(value))
    return MASK if is_secret and not is_harmless else value


def with_environment(value: Any, where: str, name: str = "") -> Any:
    """Return a copy of nested values in which environment variables replace ``${NAME}`` and
    ``Bearer ${NAME}``.

    Args:
        where: beginning of error messages.
        name: name of the value, which tells if it is a secret.

    Raises:
        ValueError: if a variable is not set, or if a secret was masked when it was written.
    """
    if isinstance(value, dict):
        resolved = {}
        for key, inner in value.items():
            # Everything below the name of a secret was masked: the message must say this name.
            inner_name = name if names_a_secret(name) else str(key)
            resolved[key] = with_environment(inner, where, inner_name)
        return resolved
    if isinstance(value, list | tuple):
        return [with_environment(inner, where, name) for inner in value]
    # Otherwise a service would refuse "***", and every completion would have no reward.
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

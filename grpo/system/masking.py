"""Secrets in a configuration, such as a reward's ``api_key``: masked wherever a run writes, or taken from the environment when used.

A value is secret if the name of its key says so (:data:`SECRET_KEY`). A reference ``${NAME}`` to an environment variable is no secret:
it is written as it is, and replaced by the variable's value in the process that uses it.
"""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

SECRET_KEY = re.compile(
    r"(api|access|private|secret|auth)[_-]?keys?$|secret|passw|passphrase|credential|authorization|bearer|^pwd$|^auth$"
    r"|^tokens?$|(api|access|auth|hf|bearer|refresh)[_-]?tokens?$",
    re.IGNORECASE,
)
"""Names of keys whose values are secret: ``api_key``, ``password``, ``hf_token``, but not ``max_tokens`` or ``stop_token``."""
MASK = "***"
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def masked(values: Any) -> Any:
    """A copy of nested values in which every secret is replaced by :data:`MASK`."""
    return _map(values, lambda value, is_secret: MASK if is_secret else value)


def mask_command_line(values: Any) -> None:
    """Replace every secret of nested values in ``sys.argv``, which ``run.json`` and wandb record."""

    def mask(value: Any, is_secret: bool) -> None:
        if is_secret and str(value):
            sys.argv[1:] = [argument.replace(str(value), MASK) for argument in sys.argv[1:]]

    _map(values, mask)


def with_environment(values: Any, where: str) -> Any:
    """A copy of nested values in which each ``${NAME}`` is replaced by that environment variable.

    Raises:
        ValueError: in one line that begins with ``where``, if a variable is not set, or if a secret was masked when it was written.
    """

    def variable(match: re.Match) -> str:
        if match[1] not in os.environ:
            raise ValueError(f"{where}: the environment variable {match[1]} of {match[0]} is not set")
        return os.environ[match[1]]

    def resolve(value: Any, is_secret: bool) -> Any:
        if is_secret and value == MASK:
            raise ValueError(
                f"{where}: a secret was masked when the configuration was written: give it again, or write ${{NAME}}"
            )
        return REFERENCE.sub(variable, value) if isinstance(value, str) else value

    return _map(values, resolve)


def _map(value: Any, function: Callable[[Any, bool], Any], is_secret: bool = False) -> Any:
    """Apply ``function(value, is it secret)`` to every number and text in nested dictionaries and lists."""
    if isinstance(value, dict):
        named = {key: is_secret or bool(SECRET_KEY.search(str(key))) for key in value}
        return {key: _map(item, function, named[key]) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, function, is_secret) for item in value]
    refers = isinstance(value, str) and REFERENCE.search(value)
    return function(value, is_secret and value is not None and not isinstance(value, bool) and not refers)

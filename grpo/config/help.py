"""Texts about keys: ``--help``, suggestions for misspelt keys, and errors in values."""

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from grpo.config.aliases import OTHER_NAMES
from grpo.config.secrets import masked

USAGE = """\
usage: python train_grpo.py [--config FILE.yaml] [section.key=value ...] [--debug]
       torchrun --nproc_per_node=8 train_grpo.py [--config FILE.yaml] [section.key=value ...]
       python train_grpo.py --help WORD ...       only the keys with one of these words \
(a section, a key)

Without --config: configs/tiny_arithmetic.yaml, a demo that runs in minutes on a CPU. \
Values are read as YAML.
--debug: one process, a few prompts, 2 steps, everything printed and checked.
"""

KEYS_EPILOG = "The keys of the configuration: python train_grpo.py --help [SECTION or WORD]"
"""Last line of the text that ``--help`` prints for commands that read a configuration."""


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every key of the configuration, written ``section.key``, with its pydantic field."""
    fields = {}
    for name, field in model.model_fields.items():
        # A section is recognized by its default, since the annotation of a key may also be a
        # mapping or a list of models.
        is_section = isinstance(field.default, BaseModel)
        if is_section:
            fields |= keys_of(type(field.default), f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


def help_text(model: type[BaseModel], words: Sequence[str]) -> str:
    """Return the text of ``--help``: the keys that contain one of the words, with type, default and
    meaning. Without words, return the usage and all keys.

    Raises:
        ValueError: if no key contains one of the words.
    """
    lines = [] if words else [USAGE]
    keys = keys_of(model)
    for key, field in keys.items():
        if words and not any(word in key for word in words):
            continue
        lines.append(f"{key}  ({type_name(field.annotation)}; default {as_yaml(field.default)})")
        # The description is the docstring under the key, which is wrapped in the source.
        lines.append(f"    {' '.join(field.description.split())}")
    if not lines:
        raise ValueError(f"--help: {unknown_key(words[0], list(keys))}")
    return "\n".join(lines)


def type_name(annotation: Any) -> str:
    """Return a type as a user writes its values: ``float | none``, ``auto | true | false``,
    ``list[str]``."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    # The annotation adds bounds and functions of pydantic. They are left out: an error in a value
    # names them.
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(map(as_yaml, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(type_name, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_name, arguments))}]"
    return "none" if annotation is types.NoneType else annotation.__name__


def as_yaml(value: Any) -> str:
    """Return a value as one line of YAML that the command line can read."""
    # YAML writes `null`, and the documents `none`.
    if value is None:
        return "none"
    plain = to_jsonable_python(value)
    text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"))
    # YAML ends a document that is a single word or number with dots.
    return text.removesuffix("\n...\n").strip()


def unknown_key(key: str, keys: list[str]) -> str:
    """Return the message for a key that does not exist. The message names the key that was probably
    meant, or else the keys of the section."""
    leaf = key.rpartition(".")[2]
    suggestion = ""
    for pattern, answer in OTHER_NAMES.items():
        if fnmatchcase(key, pattern) or fnmatchcase(leaf, pattern):
            suggestion = answer
            break
    # The name may be misspelt, or right but in a wrong section.
    if not suggestion:
        sections = [name.partition(".")[0] for name in keys]
        # A later entry replaces an earlier entry. So a section wins over keys that end in its name,
        # and of several keys with the same end the first key wins.
        full_names = {name.rpartition(".")[2]: name for name in [*reversed(keys), *sections]}
        similar = difflib.get_close_matches(leaf, full_names, n=1, cutoff=0.72)
        if not similar:
            section = f"{key.partition('.')[0]}."
            in_section = [name for name in keys if name.startswith(section)]
            return f"unknown key {key!r}; known are {', '.join(in_section) or 'those of --help'}"
        suggestion = full_names[similar[0]]
    name, _, note = suggestion.partition("; ")
    if " " in name:
        return f"unknown key {key!r}: {suggestion}"
    return f"unknown key {key!r}; did you mean {name!r}? {note}".strip()


def explain(error: Mapping[str, Any], keys: list[str]) -> str:
    """Return an error of pydantic as one line: the key, the value and what would work."""
    # Pydantic adds "[key]" for a key of a mapping.
    key = ".".join(map(str, error["loc"])).removesuffix(".[key]")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return unknown_key(key, keys)
    # `model=Qwen/Qwen2.5-0.5B` gives a value to a section.
    if error["type"] == "model_type" and "." not in key:
        hint = OTHER_NAMES.get(key, "it has several keys")
        return (
            f"{key} is a section: {hint}; write {key}.KEY=VALUE, "
            f'or in Python {key}={{"KEY": VALUE}} (--help {key}: its keys)'
        )
    # The message of a check of several keys names the keys itself.
    if not key:
        return message
    # The value has a secret in the middle of a text, which masked() does not find. So the message
    # has no value.
    if "is a secret" in message:
        return f"{key}: {message}"
    name = key.rpartition(".")[2]
    value = masked({name: error["input"]})[name]
    return f"{key}={value!r:.80}: {message[:1].lower()}{message[1:]}{OTHER_NAMES.get(key, '')}"

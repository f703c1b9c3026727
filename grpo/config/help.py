"""Texts about keys: ``--help``, the key that a misspelt one resembles, and the error in a value."""

import difflib
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo.config.aliases import OTHER_NAMES, SECTIONS
from grpo.config.secrets import masked

USAGE = """\
usage: python train_grpo.py [--config FILE.yaml] [section.key=value ...] [--debug]
       torchrun --nproc_per_node=8 train_grpo.py [--config FILE.yaml] [section.key=value ...]
       python train_grpo.py --help SECTION        its keys with type, default and meaning
       python train_grpo.py --help WORD ...       one key, or those with this word; --help all: every key

Without --config: configs/tiny_arithmetic.yaml, a demo that runs in minutes on a CPU. Values are read as YAML.
--debug: one process, a few prompts, 2 steps, everything printed and checked."""

KEYS_EPILOG = "The keys of the configuration: python train_grpo.py --help [SECTION or WORD]"
"""The last line of the help of commands that read a configuration."""


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key of the configuration, written ``section.key``, with its pydantic field."""
    found = {}
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):  # a section
            found |= keys_of(type(field.default), f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def help_text(model: type[BaseModel], words: Iterable[str] = ()) -> str:
    """Usage and the sections; with words (or ValueError) the keys that contain one, with type, default and meaning."""
    keys = keys_of(model)
    if not words:
        index = ""
        for section, field in model.model_fields.items():
            names = ", ".join(key.partition(".")[2] for key in keys if key.startswith(f"{section}."))
            index += f"\n{section:<13}{textwrap.shorten(names or field.description, 106, placeholder=' ...')}"
        return f"{USAGE}\n\nSections, and the keys outside of them:\n{index}"
    if "all" in words:
        return _describe(keys)
    found: set[str] = set()
    for word in words:
        matches = {key for key in keys if key == word or key.startswith(f"{word.rstrip('.')}.")}
        matches = matches or {key for key in keys if word in key or OTHER_NAMES.get(word) == key}
        if not matches:
            raise ValueError(f"--help {word}: {unknown_key(word, list(keys))}")
        found |= matches
    return _describe({key: field for key, field in keys.items() if key in found})


def _describe(keys: Mapping[str, FieldInfo]) -> str:
    lines, previous = [], None
    for key, field in keys.items():
        section = key.rpartition(".")[0]
        lines += [""] * (previous not in (None, section))
        previous, meaning = section, " ".join((field.description or "").split())
        lines.append(f"{key}  ({_type_name(field.annotation)}; default {as_yaml(field.default)})\n    {meaning}")
    return "\n".join(lines)


def _type_name(annotation: Any) -> str:
    """A type as a user writes its values: ``float | none``, ``auto | true | false``, ``list[str]``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(map(as_yaml, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("none" if a is type(None) else _type_name(a) for a in arguments)
    if origin is tuple:
        origin = list
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_name, arguments))}]"
    return "mapping" if issubclass(annotation, BaseModel) else annotation.__name__


def as_yaml(value: Any) -> str:
    """A value in one line, as the command line reads it."""
    if value is None:
        return "none"
    if isinstance(value, str | bool | float | int) and value != "":
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, list | tuple):
        value = [item.model_dump(exclude_unset=True) if isinstance(item, BaseModel) else item for item in value]
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf")).strip()


def unknown_key(key: str, known: list[str], other_names: Mapping[str, str] = OTHER_NAMES) -> str:
    """The error for a key that does not exist, naming the key that was probably meant."""
    leaf = key.rpartition(".")[2]
    names = {k.rpartition(".")[2]: k for k in reversed(known)}
    names |= {section: section for section in SECTIONS}
    meant = other_names.get(leaf)
    if meant is not None and meant not in known:
        return f"unknown key {key!r}: {meant}"
    if meant is None:  # a wrong section, or a misspelt name
        similar = difflib.get_close_matches(leaf, names, n=1, cutoff=0.72)
        meant = names.get(leaf) or (names[similar[0]] if similar else None)
    return f"unknown key {key!r}; " + (f"did you mean {meant!r}?" if meant else "see --help all, or docs/from_trl.md")


def explain(error: Mapping[str, Any], known: list[str]) -> str:
    """One of pydantic's errors in one line: the key, the value and what would work."""
    key = ".".join(str(part) for part in error["loc"])
    is_section = key in SECTIONS
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return unknown_key(key, known)
    if error["type"] == "model_type" and is_section:
        how = f'write {key}.KEY=VALUE, or in Python {key}={{"KEY": VALUE}}'
        return f"{key} is a section: {SECTIONS[key]}; {how} (--help {key}: its keys)"
    if not key or (error["type"] == "value_error" and is_section):
        return message  # it is about several keys, and names them
    if error["type"] == "missing" or "is a secret" in message:
        return f"{key}: {message}"
    name = key.rpartition(".")[2]
    return f"{key}={masked({name: error['input']})[name]!r:.80}: {message[:1].lower()}{message[1:]}"

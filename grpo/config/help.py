"""Texts about keys: ``--help``, the key that a misspelt one resembles, and the error in a value."""

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
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
       python train_grpo.py --help WORD ...       only the keys with one of these words (a section, a key)

Without --config: configs/tiny_arithmetic.yaml, a demo that runs in minutes on a CPU. Values are read as YAML.
--debug: one process, a few prompts, 2 steps, everything printed and checked.
"""

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


def help_text(model: type[BaseModel], words: Sequence[str] = ()) -> str:
    """The keys that contain one of the words, with type, default and meaning; without words the
    usage and all keys."""
    lines = []
    keys = keys_of(model)
    for key, field in keys.items():
        if not words or any(word in key for word in words):
            meaning = " ".join(field.description.split())
            lines.append(
                f"{key}  ({type_name(field.annotation)}; default {as_yaml(field.default)})"
            )
            lines.append(f"    {meaning}")
    if not lines:
        raise ValueError(f"--help: {unknown_key(words[0], list(keys))}")
    return "\n".join(lines if words else [USAGE, *lines])


def type_name(annotation: Any) -> str:
    """A type as a user writes its values: ``float | none``, ``auto | true | false``,
    ``list[str]``."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
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
    """A value in one line, as the command line reads it."""
    if value is None:
        return "none"
    plain = to_jsonable_python(value)
    text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n...\n").strip()


def unknown_key(key: str, known: list[str], other_names: Mapping[str, str] = OTHER_NAMES) -> str:
    """The error for a key that does not exist, naming the key that was probably meant."""
    leaf = key.rpartition(".")[2]
    meant = other_names.get(leaf)
    if meant is None:  # a wrong section, or a misspelt name
        sections = [name.partition(".")[0] for name in known]
        names = {name.rpartition(".")[2]: name for name in [*reversed(known), *sections]}
        similar = difflib.get_close_matches(leaf, names, n=1, cutoff=0.72)
        if not similar:
            return f"unknown key {key!r}; see --help, or docs/from_trl.md"
        meant = names[similar[0]]
    if " " in meant:
        return f"unknown key {key!r}: {meant}"
    return f"unknown key {key!r}; did you mean {meant!r}?"


def explain(error: Mapping[str, Any], known: list[str]) -> str:
    """One of pydantic's errors in one line: the key, the value and what would work."""
    key = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return unknown_key(key, known)
    if error["type"] == "model_type" and "." not in key:
        hint = OTHER_NAMES.get(key, "it has several keys")
        how = f'write {key}.KEY=VALUE, or in Python {key}={{"KEY": VALUE}}'
        return f"{key} is a section: {hint}; {how} (--help {key}: its keys)"
    if not key:
        return message  # it is about several keys, and names them
    if "is a secret" in message:
        return f"{key}: {message}"
    name = key.rpartition(".")[2]
    shown = masked({name: error["input"]})[name]
    return f"{key}={shown!r:.80}: {message[:1].lower()}{message[1:]}"

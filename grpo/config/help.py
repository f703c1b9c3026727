"""Texts about keys: ``--help``, the key that a misspelt one resembles, and the error in a value."""

import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo.config.aliases import ALIASES, EXPLANATIONS
from grpo.config.secrets import masked

USAGE = """\
usage: python train_grpo.py [--config FILE.yaml] [section.key=value ...] [--debug]
       torchrun --nproc_per_node=8 train_grpo.py [--config FILE.yaml] [section.key=value ...]
       python train_grpo.py --help [WORD ...]     the keys of a section (optim), one key (optim.learning_rate), all with a word (length)

Without --config: configs/tiny_arithmetic.yaml, a demo that runs in minutes on a CPU. A key that the file does not set has the default below.
Values are read as YAML, lists and mappings too. --debug: one process, a few prompts, 2 steps, everything printed and checked."""

KEYS_EPILOG = "The keys of the configuration: python train_grpo.py --help [SECTION or WORD]"
"""The last line of the help of commands that read a configuration."""


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key of the configuration, written ``section.key``, with its pydantic field."""
    found = {}
    for name, field in model.model_fields.items():
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        found |= keys_of(field.annotation, f"{prefix}{name}.") if is_section else {prefix + name: field}
    return found


def help_text(model: type[BaseModel]) -> str:
    """Usage, then every key with type, default and meaning."""
    return f"{USAGE}\n{_describe(keys_of(model))}"


def help_on(words: list[str], model: type[BaseModel]) -> str:
    """The keys that words name, with type, default and meaning: those of a section, a single one, or all that contain the word.

    Raises:
        ValueError: if a word names no key.
    """
    known = keys_of(model)
    found: dict[str, FieldInfo] = {}
    for word in words:
        name = word.strip(".").lower()
        matches = [key for key in known if key == name or key.startswith(f"{name}.")]
        matches = matches or [key for key in known if name in key or key == ALIASES.get(name.rpartition(".")[2])]
        if not matches:
            advice = unknown_key(word, list(known)).removeprefix(f"unknown key {word!r}").lstrip(";: ")
            raise ValueError(f"--help {word}: no key contains this word; {advice}")
        found |= {key: known[key] for key in matches}
    return _describe({key: known[key] for key in known if key in found}).strip("\n")


def _describe(keys: Mapping[str, FieldInfo]) -> str:
    lines, previous_section = [""], ""
    for key, field in keys.items():
        section, _, _ = key.rpartition(".")
        if section != previous_section:
            lines.append("")
        previous_section = section
        meaning = " ".join((field.description or "").split())
        lines.append(f"{key}  ({_type_name(field.annotation)}; default {_default(field.default)})\n    {meaning}")
    return "\n".join(lines)


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("none" if a is type(None) else _type_name(a) for a in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if a is ... else _type_name(a) for a in arguments)}]"
    return getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    if isinstance(value, list):
        value = [item.model_dump(exclude_unset=True) if isinstance(item, BaseModel) else item for item in value]
    return "none" if value is None else str(value)


def unknown_key(key: str, known: list[str]) -> str:
    """The error for a key that does not exist, naming the key that was probably meant."""
    section, _, leaf = key.rpartition(".")
    if not any(part.isdecimal() for part in key.split(".")):  # an entry of a list has keys of its own
        if same := [k for k in known if k.rpartition(".")[2] == leaf]:  # without a section, or with a wrong one
            meant = difflib.get_close_matches(key, same, n=1, cutoff=0.0)[0] if section else same[0]
            return f"unknown key {key!r}; did you mean {meant!r}?"
        if leaf in ALIASES:
            return f"unknown key {key!r}; did you mean {ALIASES[leaf]!r}?"
        if leaf in EXPLANATIONS:
            return f"unknown key {key!r}: {EXPLANATIONS[leaf]}"
    known = [*known, *dict.fromkeys(k.split(".")[0] for k in known if "." in k)]
    by_leaf = {k.rpartition(".")[2]: k for k in known}
    leaves_of_section = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    for written, candidates in ((leaf, leaves_of_section), (key, {k: k for k in known}), (leaf, by_leaf)):
        if match := difflib.get_close_matches(written, candidates, n=1, cutoff=0.6):
            return f"unknown key {key!r}; did you mean {candidates[match[0]]!r}?"
    return f"unknown key {key!r}; --help lists all keys"


def not_a_section(key: str, known: list[str]) -> str:
    """The error for a value given to a whole section."""
    return f"{key} is a section: write {next(k for k in known if k.startswith(f'{key}.'))}=..."


def explain(error: Mapping[str, Any], known: list[str]) -> str:
    """One of pydantic's errors in one line: the key, the value and what would work."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_key(key, known)
    message, is_section = error["msg"].removeprefix("Value error, "), any(k.startswith(f"{key}.") for k in known)
    if is_section and error["type"] == "model_type":
        return not_a_section(key, known)
    if not key or (error["type"] == "value_error" and is_section):
        return message  # it is about several keys, and names them
    if error["type"] == "missing":
        return f"{key} is missing"
    if "is a secret" in message:
        return f"{key}: {message}"
    shown = repr(masked({key.rpartition(".")[2]: error["input"]})[key.rpartition(".")[2]])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"{key}={shown}: {message[:1].lower()}{message[1:]}"

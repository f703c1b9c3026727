"""argv and YAML -> nested values, and pydantic's complaints -> lines a person can act on. Used by ``grpo.config`` only."""

from __future__ import annotations

import argparse
import difflib
import re
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError


class ConfigError(ValueError):
    """Something in the configuration that the user can mend; the message says how."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-6`` is a number (YAML 1.1 wants ``1.0e-6``) and a key given twice is an error."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor`, resolved by the parent class
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else repr(key))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML; a :class:`ConfigError` names ``source``, line and problem."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:  # a NUL byte, say
        where = f"{source}:{text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(f"{where}: not valid YAML: character {chr(error.character)!r} is not allowed") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(
            f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}".replace("\n", " ")
        ) from None


def _section_of(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> pydantic field, for every leaf of the configuration."""
    found = {}
    for name, info in model.model_fields.items():
        section = _section_of(info.annotation)
        found |= keys_of(section, f"{prefix}{name}.") if section else {prefix + name: info}
    return found


def _nearest(key: str, known: list[str]) -> str:
    """The known dotted key a typo most likely meant, looking at the whole key and at its last part."""
    known = [*known, *dict.fromkeys(k.split(".")[0] for k in known if "." in k)]  # sections can be misspelt too
    leaf = key.rsplit(".", 1)[-1]
    same_section = [k for k in known if k.rsplit(".", 1)[0] == key.rsplit(".", 1)[0]]
    for candidates, text, of in (
        (same_section, leaf, lambda k: k.rsplit(".", 1)[-1]),
        (known, key, lambda k: k),
        (known, leaf, lambda k: k.rsplit(".", 1)[-1]),
    ):
        by_text = {of(k): k for k in candidates}
        match = difflib.get_close_matches(text, by_text, n=1, cutoff=0.6)
        if match:
            return f"; did you mean {by_text[match[0]]!r}?"
    return "; --help lists all keys"


def parse_arguments(argv: list[str], model: type[BaseModel]) -> tuple[dict[str, Any], bool]:
    """argv -> (nested values of file and overrides, whether ``--debug`` was given)."""
    parser = argparse.ArgumentParser(prog="train_grpo.py", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    try:
        options, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if options.help:
        print(help_text(model))
        raise SystemExit(0)
    values = _read_file(options.config) if options.config is not None else {}
    known = list(keys_of(model))
    for item in rest:
        key, equals, text = item.partition("=")
        if key.startswith("-") or not equals or not key:
            raise ConfigError(
                f"argument {item!r} is not understood: use section.key=value, --config FILE, --debug or --help"
            )
        _set(values, key, _override_value(key, text), known)
    return values, options.debug


def _override_value(key: str, text: str) -> Any:
    # No comments on a command line: `data.answer_pattern=#### (.+)` is a value, not nothing.
    if re.search(r"(^|\s)#", text) and text.lstrip()[:1] not in ("'", '"', "[", "{", "|", ">"):
        return text.strip()
    return read_yaml(text, f"{key}=")


def _read_file(name: str) -> dict[str, Any]:
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        nearby = sorted(str(p) for p in Path("configs").glob("*.yaml"))
        raise ConfigError(
            f"config file {name} does not exist" + (f"; there are {', '.join(nearby)}" if nearby else "")
        ) from None
    except OSError as error:
        raise ConfigError(f"config file {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file {name} cannot be read: it is not UTF-8 text ({error.reason}, byte {error.start})"
        ) from None
    values = read_yaml(text, name)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected a mapping of sections, got {type(values).__name__}")
    # `model:` with nothing under it means the section's defaults.
    return {key: {} if value is None else value for key, value in values.items()}


def text_of_file(name: str) -> str:
    """The text of a file that a key names, without the line break at its end.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        return Path(name).expanduser().read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is not UTF-8 text ({error.reason}, byte {error.start})") from None


def _set(values: dict[str, Any], key: str, value: Any, known: list[str]) -> None:
    """Write one dotted override. Below a leaf (``reward.functions``) nothing can be addressed: it is given whole."""
    if key not in known and key not in {k.split(".")[0] for k in known if "." in k}:
        raise ConfigError(f"unknown key {key!r}{_nearest(key, known)}")
    *parents, leaf = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{parent}={inner!r}: expected a section with keys")
        values = inner
    values[leaf] = value


def validate(model: type[BaseModel], values: dict[str, Any]) -> Any:
    """Nested values -> model; every mistake at once, one line each."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_explain(item, list(keys_of(model))) for item in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _explain(item: dict[str, Any], known: list[str]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest(key, known)}"
    message = item["msg"].removeprefix("Value error, ")
    if not key:
        return message
    if item["type"] == "missing":
        return f"{key} is missing"
    shown = repr(item["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"{key}={shown}: {message[:1].lower()}{message[1:]}"


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


def help_text(model: type[BaseModel]) -> str:
    """Every key with type, default and meaning."""
    lines = [
        "usage: python train_grpo.py --config FILE.yaml [section.key=value ...] [--debug]",
        "       torchrun --nproc_per_node=8 train_grpo.py --config FILE.yaml [section.key=value ...]",
        "",
        "Values are read as YAML, lists and mappings too. --debug: one process, a few prompts, 2 steps, everything printed.",
    ]
    section = None
    for key, info in keys_of(model).items():
        if key.count(".") and key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append("")
        meaning = " ".join((info.description or "").split())
        lines.append(f"{key}  ({_type_name(info.annotation)}; default {_default(info.default)})\n    {meaning}")
    return "\n".join(lines)

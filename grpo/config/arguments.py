"""Read a configuration from the command line, a YAML file or Python values."""

import argparse
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo.config.bounded_yaml import BoundedLoader
from grpo.config.config import Config, debug_variant
from grpo.config.help import explain, help_on, help_text, keys_of, not_a_section, unknown_key
from grpo.config.secrets import masked

STEP_SIZES = ("prompts_per_step", "prompts_per_rank")
"""Two keys of the section ``rollout`` that say the same. One of them takes the place of the other one in an earlier source of settings."""


class ConfigError(ValueError):
    """A mistake of the user in the configuration; the message says what would work."""


def load_config(
    argv: list[str],
    *,
    default_file: str | Path | None = None,
    default_values: dict[str, Any] | None = None,
    num_ranks: int | None = None,
) -> Config:
    """Read a configuration, ``["--config", "file.yaml", "section.key=value", "--debug"]`` for example, and check it.

    A later override wins over an earlier one, overrides win over the file, and the file wins over the defaults.

    Args:
        argv: command line arguments, without the program's name.
        default_file: YAML file to read, with a note on the console, if ``argv`` names none; None: the defaults of the schema.
        default_values: nested values to begin with if ``argv`` names no file.
        num_ranks: the factor of ``rollout.prompts_per_rank``; None: the number of ranks that torchrun has started, 1 without torchrun.

    Raises:
        ConfigError: one line per mistake. ``SystemExit`` with code 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(prog="train_grpo.py", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    try:
        options, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if options.help:
        words = [word for word in overrides if "=" not in word and not word.startswith("-")]
        try:
            print(help_on(words, Config) if words else help_text(Config))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        raise SystemExit(0)
    if (file := options.config) is None and default_file is not None:
        file = os.path.relpath(default_file)
        if os.environ.get("RANK", "0") == "0":  # torchrun starts this program once per rank
            print(f"config    {file}, since there is no --config", flush=True)
    values = read_config_file(file) if file is not None else dict(default_values or {})
    typed: dict[str, Any] = {}
    for override in overrides:
        _apply(override, typed)
    _drop_replaced_step_size(values, typed)
    for override in overrides:
        _apply(override, values)
    return _checked(values, debug=options.debug, num_ranks=num_ranks)


def make_config(source: Mapping[str, Any] | str | os.PathLike[str] | Config | None, *more: Mapping[str, Any]) -> Config:
    """Read a configuration from Python values, and check it.

    Args:
        source: a mapping, nested or with dotted keys (``{"optim.max_steps": 5}``), a YAML file, or a configuration; None: the defaults.
        more: mappings of the same form. The values of a later one win.

    Raises:
        ConfigError: one line per mistake.
    """
    if isinstance(source, str | os.PathLike):
        source = read_config_file(os.fspath(source))
    elif isinstance(source, Config):
        source = source.model_dump(exclude_unset=True)
    elif source is not None and not isinstance(source, Mapping):
        kind = type(source).__name__
        raise ConfigError(f"config must be a mapping of sections, a YAML file, a Config or None, got {kind}")
    values: dict[str, Any] = {}
    for given in (source or {}, *more):
        _merge(given, alone := {})
        _drop_replaced_step_size(values, alone)
        _merge(given, values)
    return _checked(values)


def _merge(given: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Write a mapping, nested or with dotted keys, into nested values."""
    for key, value in given.items():
        *sections, leaf = str(key).split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(not_a_section(section, list(keys_of(Config))))
        if isinstance(value, Mapping) and isinstance(inner.get(leaf, {}), dict):
            _merge(value, inner.setdefault(leaf, {}))
        else:
            inner[leaf] = os.fspath(value) if isinstance(value, os.PathLike) else value


def _drop_replaced_step_size(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Remove from nested values the key of ``STEP_SIZES`` that ``given``, which wins over them, replaces by the other key."""
    old, new = values.get("rollout"), given.get("rollout")
    if (
        isinstance(old, dict)
        and isinstance(new, dict)
        and any(new.get(key) not in (None, "none") for key in STEP_SIZES)
    ):
        for key in STEP_SIZES:
            if key not in new:
                old.pop(key, None)


def _checked(values: dict[str, Any], *, debug: bool = False, num_ranks: int | None = None) -> Config:
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        known = list(keys_of(Config))
        raise ConfigError("\n".join(dict.fromkeys(explain(item, known) for item in error.errors()))) from None
    config = _with_problems_of_all_ranks(config, num_ranks or _num_ranks())
    return debug_variant(config) if debug or config.debug else config


def _with_problems_of_all_ranks(config: Config, num_ranks: int) -> Config:
    """The configuration with ``prompts_per_rank`` times the ranks as ``prompts_per_step``, the only key that the rest of the program reads."""
    r = config.rollout
    if r.prompts_per_rank is None:
        return config
    product = r.prompts_per_rank * num_ranks
    if "prompts_per_step" in r.model_fields_set and r.prompts_per_step != product:
        raise ConfigError(
            f"rollout.prompts_per_step={r.prompts_per_step} and rollout.prompts_per_rank={r.prompts_per_rank} on {num_ranks} rank(s), "
            f"that is prompts_per_step={product}, contradict each other: set one of the two"
        )
    sizes = {"prompts_per_step": product, "prompts_per_rank": None}
    return config.model_copy(update={"rollout": r.model_copy(update=sizes)})


def _num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def _apply(override: str, values: dict[str, Any]) -> None:
    """Write one ``section.key=value`` into nested values."""
    key, equals, text = override.partition("=")
    if key.startswith("-") or not equals or not key:
        raise ConfigError(
            f"argument {override!r} is not understood: use section.key=value, --config FILE, --debug or --help"
        )
    known = list(keys_of(Config))
    if key not in known and key not in Config.model_fields:
        raise ConfigError(unknown_key(key, known))
    value = _value_of(key, text)
    *sections, leaf = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(not_a_section(section, known))
        values = inner
    values[leaf] = value


def _value_of(key: str, text: str) -> Any:
    """The value of ``key=text`` on the command line: YAML, except where its signs belong to a text.

    A ``#``, which starts a comment in YAML, is part of the value. So are ``: `` and ``{``, which make a mapping, where the key takes a
    text (``data.question_template=Question: {prompt}``).
    """
    field = keys_of(Config).get(key)
    takes_text = field is not None and field.annotation in (str, str | None)
    yaml_only = ("'", '"', "|", ">") if takes_text else ("'", '"', "[", "{", "|", ">")
    is_plain = re.search(r"(^|\s)#|:\s|^\s*\{" if takes_text else r"(^|\s)#", text)
    return text.strip() if is_plain and not text.lstrip().startswith(yaml_only) else read_yaml(text, f"{key}=")


def mask_command_line() -> None:
    """Mask the secrets of ``section.key=value`` in ``sys.argv``, which ``run.json`` and wandb record."""
    sys.argv[:] = map(masked_argument, sys.argv)


def masked_argument(argument: str) -> str:
    """An argument of the command line, with the secrets masked if it is ``section.key=value``."""
    key, equals, text = argument.partition("=")
    if equals and key in keys_of(Config):
        value = _value_of(key, text)
        if (without_secrets := masked(value)) != value:
            shown = yaml.safe_dump(without_secrets, default_flow_style=True, width=math.inf)
            return f"{key}={shown.strip()}"
    return argument


def read_config_file(name: str | Path) -> dict[str, Any]:
    """The values of a YAML file; raises a ``ConfigError`` that names the file and the problem."""
    try:
        with open(os.path.expanduser(name), encoding="utf-8") as file:
            text = file.read(BoundedLoader.MAX_CHARACTERS + 1)
    except FileNotFoundError:
        existing = ", ".join(sorted(map(str, Path("configs").glob("*.yaml"))))
        raise ConfigError(f"config file {name} does not exist{existing and '; there are '}{existing}") from None
    except OSError as error:
        raise ConfigError(f"config file {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 text ({error.reason}, byte {error.start})"
        raise ConfigError(f"config file {name} cannot be read: {problem}") from None
    if len(text) > BoundedLoader.MAX_CHARACTERS:
        problem = f"it has more than {BoundedLoader.MAX_CHARACTERS:,} characters"
        raise ConfigError(f"config file {name} cannot be read: {problem}")
    values = read_yaml(text, name)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected a mapping of sections, got {type(values).__name__}")
    # `model:` with nothing under it means the section's defaults.
    return {key: {} if value is None else value for key, value in values.items()}


def read_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; raises a ``ConfigError`` that names ``source``, line and problem."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None
    except yaml.reader.ReaderError as error:  # a character that YAML does not allow, such as NUL
        where = f"{source}:{text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(f"{where}: not valid YAML: character {chr(error.character)!r} is not allowed") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or error
        hint = '; an unquoted # begins a comment: write "####"' if " ####" in text else ""
        raise ConfigError(f"{where}: not valid YAML: {problem}{hint}".replace("\n", " ")) from None


class _Loader(BoundedLoader):
    """Safe YAML in which ``1e-6`` is a number (YAML 1.1 wants ``1.0e-6``) and a key that is given twice is an error."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor`, which the parent class resolves
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else repr(key))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)

"""Read a configuration from the command line, a YAML file, Python values, or the folder of a
checkpoint."""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo.config.config import Config, debug_changes
from grpo.config.help import as_yaml, explain, help_text, keys_of, type_name
from grpo.config.secrets import masked


class ConfigError(ValueError):
    """A mistake of the user in the configuration; the message says what would work."""


def load_config(
    argv: list[str],
    *,
    default_file: str | Path | None = None,
    default_values: dict[str, Any] | None = None,
) -> Config:
    """Read a configuration, ``["--config", "file.yaml", "section.key=value", "--debug"]`` for
    example, and check it.

    A later override wins over an earlier one, overrides win over the file, and the file wins over
    the defaults.

    Args: argv: command line arguments, without the program's name. default_file: YAML file to read,
        with a note on the console, if ``argv`` names none. default_values: nested values to begin
        with if there is no file; None: the defaults of the schema.

    Raises:
        ConfigError: one line per mistake. ``SystemExit`` with code 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(prog="train_grpo.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    options, overrides = parser.parse_known_args(argv)
    if options.help:
        print(help_text(Config, overrides))
        raise SystemExit(0)

    file = options.config
    if file is None and default_file is not None:
        file = os.path.relpath(default_file)
        if os.environ.get("RANK", "0") == "0":  # torchrun starts this program once per rank
            print(f"config    {file}, since there is no --config", flush=True)
    changes = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if key.startswith("-") or not equals:
            usage = "use section.key=value without dashes, --config FILE, --debug or --help"
            raise ConfigError(f"argument {override!r} is not understood: {usage}")
        changes.append({key: _value_of(key, text)})
    config = make_config(default_values if file is None else file, *changes)
    if options.debug:
        config = make_config(config, debug_changes(config))
        config._debug = True
    return config


def make_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | Config | None,
    *more: Mapping[str, Any],
) -> Config:
    """Read a configuration from Python values, and check it.

    Args: source: a mapping, nested or with dotted keys (``{"optim.max_steps": 5}``), a YAML file,
        or a configuration;
            None: the defaults.
        more: mappings of the same form. The values of a later one win.
    """
    values: dict[str, Any] = {}
    if isinstance(source, str | os.PathLike):
        source = read_config_file(source)
    start = source.given if isinstance(source, Config) else _as_given(source or {})
    for new in (start, *more):
        _merge(new, values)
    config = _checked(values)
    config._debug = isinstance(source, Config) and source.debug
    return config


def _merge(new: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Write a mapping, nested or with dotted keys, into nested values."""
    for key, value in new.items():
        *sections, leaf = str(key).split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{section} is a section: write {section}.KEY=VALUE")
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, Mapping) and isinstance(inner.get(leaf, {}), dict):
            _merge(value, inner.setdefault(leaf, {}))
        else:
            inner[leaf] = value


def _checked(values: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        known = list(keys_of(Config))
        lines = [explain(item, known) for item in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _as_given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a saved configuration was made from: those of its entry ``given``, if it has
    one.

    ConfigError if the other values are not those that follow from the entry: nobody can tell which
    the user means."""
    sections: dict[str, Any] = {}
    _merge(values, sections)
    given = sections.pop("given", None)
    if given is None:
        return sections
    if sections and _checked(sections) != _checked(given):
        remedy = "change both, or remove one of the two"
        raise ConfigError(f"values differ from those that follow from the entry `given`: {remedy}")
    return given


def _value_of(key: str, text: str) -> Any:
    """The value of ``key=text`` on the command line: YAML, and a plain text where the key takes
    one."""
    field = keys_of(Config).get(key)
    takes_text = field is not None and type_name(field.annotation) in ("str", "str | none")
    is_quoted = text.startswith(("'", '"'))
    if takes_text and text != "null" and not is_quoted:
        return text
    return read_yaml(text, f"{key}=")


def mask_command_line() -> None:
    """Mask the secrets of ``section.key=value`` in ``sys.argv``, which ``starts.jsonl`` and wandb
    record."""
    sys.argv[:] = map(masked_argument, sys.argv)


def masked_argument(argument: str) -> str:
    """An argument of the command line, with the secrets masked if it is ``section.key=value``."""
    key, _, text = argument.partition("=")
    if key.split(".")[0] not in Config.model_fields:
        return argument
    value = _value_of(key, text)
    hidden = masked(value)
    if hidden == value:
        return argument
    return f"{key}={as_yaml(hidden)}"


def read_config_file(name: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a YAML file; a ``ConfigError`` names the file and what is wrong in it."""
    text = Path(name).expanduser().read_text(encoding="utf-8")
    values = read_yaml(text, str(name)) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected a mapping of sections, got {type(values).__name__}")
    # `model:` with nothing under it means the section's defaults.
    return {key: value for key, value in values.items() if value is not None}


def read_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; raises a ``ConfigError`` that names ``source``, line and
    problem."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{source}: not valid YAML: {problem}") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a repeated key is an error."""

    def construct_mapping(self, node, deep=False):
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                problem = f"key {key_node.value!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-6 for text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def config_of_models(
    models: Sequence[str],
    config_file: str | None,
    overrides: list[str],
    *,
    without_run: dict[str, Any] | None = None,
) -> tuple[Config, Path | None]:
    """The configuration for a command that takes models, and the file of the run that it is based
    on; None: of none.

    Args:
        config_file: the argument of ``--config``; None: the configuration of the run that wrote the
            first model of a run.
        without_run: nested values to begin with if there is neither; None: the defaults.
    """
    if config_file is not None:
        return load_config(["--config", config_file, *overrides]), None
    for model in models:
        folder = Path(model).expanduser().resolve()
        run = folder.parent if folder.name.startswith("checkpoint-") else folder
        # A checkpoint has the configuration of its run, also where it was moved or copied.
        file = folder / "trainer" / "state.json"
        if file.is_file():
            values = json.loads(file.read_text(encoding="utf-8"))["config"]
        else:
            file = run / "config.yaml"
            values = read_config_file(file) if file.is_file() else None
        if values is not None:
            return load_config([f"output_dir={run}", *overrides], default_values=values), file
    return load_config(overrides, default_values=without_run), None

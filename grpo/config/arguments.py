"""Read a configuration from the command line, a YAML file, Python values, or the folder of a checkpoint."""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from grpo.config.aliases import SECTIONS
from grpo.config.config import Config, debug_changes
from grpo.config.help import as_yaml, explain, help_text, keys_of
from grpo.config.secrets import masked


class ConfigError(ValueError):
    """A mistake of the user in the configuration; the message says what would work."""


def load_config(
    argv: list[str], *, default_file: str | Path | None = None, default_values: dict[str, Any] | None = None
) -> Config:
    """Read a configuration, ``["--config", "file.yaml", "section.key=value", "--debug"]`` for example, and check it.

    A later override wins over an earlier one, overrides win over the file, and the file wins over the defaults.

    Args:
        argv: command line arguments, without the program's name.
        default_file: YAML file to read, with a note on the console, if ``argv`` names none.
        default_values: nested values to begin with if there is no file; None: the defaults of the schema.

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
        print(help_text(Config, [word for word in overrides if "=" not in word and not word.startswith("-")]))
        raise SystemExit(0)
    if (file := options.config) is None and default_file is not None:
        file = os.path.relpath(default_file)
        if os.environ.get("RANK", "0") == "0":  # torchrun starts this program once per rank
            print(f"config    {file}, since there is no --config", flush=True)
    values: dict[str, Any] = {}
    _merge(read_config_file(file) if file is not None else default_values or {}, values)
    for override in overrides:
        key, equals, text = override.partition("=")
        if key.startswith("-") or not equals or not key:
            usage = "use section.key=value without dashes, --config FILE, --debug or --help"
            raise ConfigError(f"argument {override!r} is not understood: {usage}")
        _merge({key: _value_of(key, text)}, values)
    return _checked(values, debug=options.debug)


def make_config(source: Mapping[str, Any] | str | os.PathLike[str] | Config | None, *more: Mapping[str, Any]) -> Config:
    """Read a configuration from Python values, and check it.

    Args:
        source: a mapping, nested or with dotted keys (``{"optim.max_steps": 5}``), a YAML file, or a configuration;
            None: the defaults.
        more: mappings of the same form. The values of a later one win.
    """
    debug = isinstance(source, Config) and source.debug
    if isinstance(source, str | os.PathLike):
        source = read_config_file(source)
    elif isinstance(source, Config):
        source = source.given
    values: dict[str, Any] = {}
    for new in (_as_given(source or {}), *more):
        _merge(new, values)
    config = _checked(values)
    config._debug = debug
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
        if isinstance(value, Mapping) and isinstance(inner.get(leaf, {}), dict):
            _merge(value, inner.setdefault(leaf, {}))
        else:
            inner[leaf] = os.fspath(value) if isinstance(value, os.PathLike) else value


def _checked(values: dict[str, Any], *, debug: bool = False) -> Config:
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        known = list(keys_of(Config))
        raise ConfigError("\n".join(dict.fromkeys(explain(item, known) for item in error.errors()))) from None
    if debug:
        config = make_config(config, debug_changes(config))
        config._debug = True
    return config


def _as_given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a saved configuration was made from: those of its entry ``given``.

    A value of its sections that does not follow from ``given`` was changed by the user in the file,
    and takes the place of the one there. Values without an entry ``given`` stay as they are.

    ConfigError if only some keys of the entry are in the sections: nobody can tell whether the
    others are meant to stay.
    """
    sections: dict[str, Any] = {}
    _merge(values, sections)
    given = sections.pop("given", None)
    if given is None:
        return sections
    if not sections:
        return given
    written = _checked(sections).model_dump(mode="json")
    made = _checked(given).model_dump(mode="json")
    for name in SECTIONS:
        removed = given.get(name, {}).keys() - sections.get(name, {}).keys()
        if removed:
            key = f"{name}.{min(removed)}"
            raise ConfigError(f"{key} is in `given` alone: remove it there too, or write it above as well")
    for name, value in written.items():
        if value == made[name]:
            continue
        if name in SECTIONS:
            edited = {key: inner for key, inner in value.items() if inner != made[name][key]}
            value = given.get(name, {}) | edited
        given[name] = value
    return given


def _value_of(key: str, text: str) -> Any:
    """The value of ``key=text`` on the command line: YAML, in which a plain ``#`` begins no comment.

    Where the key takes a text, only quotes are YAML (``data.question_template=Question: {prompt}``).
    """
    field = keys_of(Config).get(key)
    if field is not None and field.annotation in (str, str | None):
        is_yaml = text.lstrip().startswith(("'", '"', "|", ">")) or text.strip() == "null"
    else:
        is_yaml = "#" not in text or text.lstrip().startswith(("'", '"', "[", "{", "|", ">"))
    return read_yaml(text, f"{key}=") if is_yaml else text.strip()


def mask_command_line() -> None:
    """Mask the secrets of ``section.key=value`` in ``sys.argv``, which ``run.json`` and wandb record."""
    sys.argv[:] = map(masked_argument, sys.argv)


def masked_argument(argument: str) -> str:
    """An argument of the command line, with the secrets masked if it is ``section.key=value``."""
    key, equals, text = argument.partition("=")
    if not equals or key.split(".")[0] not in Config.model_fields:
        return argument
    value = _value_of(key, text)
    hidden = masked(value)
    return argument if hidden == value else f"{key}={as_yaml(hidden)}"


def read_config_file(name: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a YAML file; raises a ``ConfigError`` that names the file and the problem."""
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {name} cannot be read: {error}") from None
    values = read_yaml(text, str(name))
    if not isinstance(values, dict | None):
        raise ConfigError(f"{name}: expected a mapping of sections, got {type(values).__name__}")
    # `model:` with nothing under it means the section's defaults.
    return _as_given({key: value for key, value in (values or {}).items() if value is not None})


def read_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; raises a ``ConfigError`` that names ``source``, line and problem."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-6`` is a number (YAML 1.1 wants ``1.0e-6``) and a repeated key is an error."""

    def construct_mapping(self, node, deep=False):
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                problem = f"key {key_node.value!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class SavedConfig(NamedTuple):
    source: Path
    values: dict[str, Any]


def saved_config(model: str | Path) -> SavedConfig | None:
    """The configuration of the run that wrote a model folder, with its present ``output_dir``; None: no run did."""
    folder = Path(model).expanduser().resolve()
    in_state, beside = folder / "trainer" / "state.json", folder.parent / "config.yaml"
    is_checkpoint = re.fullmatch(r"checkpoint-\d+", folder.name) and beside.is_file()
    if in_state.is_file():
        source, values = in_state, _as_given(json.loads(in_state.read_text(encoding="utf-8"))["config"])
    else:
        source = beside if is_checkpoint else folder / "config.yaml"
        if not source.is_file():
            return None
        values = read_config_file(source)
    return SavedConfig(source, values | {"output_dir": str(folder.parent if is_checkpoint else folder)})


def config_of_models(
    models: Sequence[str], file: str | None, overrides: list[str], *, without_run: dict[str, Any] | None = None
) -> tuple[Config, SavedConfig | None]:
    """The configuration for a command that takes models, and the saved one that it is based on; None: on none.

    Args:
        file: the argument of ``--config``; None: the saved configuration of the first model that has one is taken.
        without_run: nested values to begin with if there is neither; None: the defaults.
    """
    if file is not None:
        return load_config(["--config", file, *overrides]), None
    saved = next(filter(None, map(saved_config, models)), None)
    return load_config(overrides, default_values=saved.values if saved else without_run), saved

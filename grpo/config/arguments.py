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
from grpo.config.help import as_yaml, explain, help_text, keys_of, type_name, unknown_key
from grpo.config.secrets import masked


class ConfigError(ValueError):
    """A mistake of the user in the configuration. The message says what would work."""


def load_config(
    argv: list[str],
    *,
    default_file: str | Path | None = None,
    default_values: dict[str, Any] | None = None,
) -> Config:
    """Read a configuration from command line arguments, and check it.

    Example: ``["--config", "file.yaml", "section.key=value", "--debug"]``. A later override wins
    over an earlier one, overrides win over the file, and the file wins over the defaults.

    Args:
        argv: command line arguments, without the program's name.
        default_file: YAML file that is read, with a note on the console, if ``argv`` names no file.
        default_values: nested values to begin with if there is no file. Default: the defaults of
            the schema.

    Raises:
        ConfigError: with one line per mistake.
        SystemExit: with code 0, after ``--help``.
    """
    # Without abbreviations: with a new flag, a script's --deb or --conf could change its meaning.
    parser = argparse.ArgumentParser(prog="train_grpo.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    options, overrides = parser.parse_known_args(argv)
    if options.help:
        print(help_text(Config, overrides))
        raise SystemExit(0)

    source = options.config
    if source is None and default_file is not None:
        source = os.path.relpath(default_file)
        # torchrun starts this program once per rank, and ranks do not communicate yet.
        if os.environ.get("RANK", "0") == "0":
            print(f"config    {source}, since there is no --config", flush=True)
    if source is None:
        source = default_values

    changes = []
    for override in overrides:
        # `--seed=1` is taken for `seed=1`.
        key, equals, text = override.lstrip("-").partition("=")
        if not equals:
            raise ConfigError(
                f"argument {override!r} is not understood: "
                "use section.key=value, --config FILE, --debug or --help; "
                + unknown_key(key, list(keys_of(Config))).removeprefix(f"unknown key {key!r}; ")
            )
        value = _parse_value(key, text)
        changes.append({key: value})
    config = make_config(source, *changes)
    # --debug lowers values that were set, so the values are read first.
    if options.debug:
        lowered = debug_changes(config)
        print(f"--debug   {as_yaml(lowered)}")
        config = make_config(config, lowered)
        config._debug = True
    return config


def make_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | Config | None,
    *more: Mapping[str, Any],
) -> Config:
    """Read a configuration from Python values, and check it.

    Args:
        source: a mapping, nested or with dotted keys (``{"optim.max_steps": 5}``), a YAML file, or
            a configuration. None stands for the defaults.
        more: mappings of the same form. A later mapping overrides an earlier one.

    Raises:
        ConfigError: with one line per mistake.
    """
    is_debug = False
    if isinstance(source, str | os.PathLike):
        source = read_config_file(source)
    if isinstance(source, Config):
        # Only the values that the user set are taken. Values that a preset or another key implied
        # are computed again.
        start = source.user_values
        is_debug = source.debug
    elif isinstance(source, Mapping | None):
        start = _user_values_of(source or {})
    else:
        raise ConfigError(
            f"{type(source).__name__} is no configuration: model.name_or_path names the model, and "
            "examples/yaml_from_trl.py prints a script with GRPOConfig as YAML"
        )

    values = {}
    for mapping in (start, *more):
        _merge(mapping, values)
    config = _validate(values)
    config._debug = is_debug
    return config


def _merge(mapping: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Merge a mapping, nested or with dotted keys, into the nested dictionary ``values`` in
    place."""
    for key, value in mapping.items():
        *sections, leaf = str(key).split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{section} is a section: write {section}.KEY=VALUE")
        # pydantic does not accept a Path as a text.
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        # A mapping changes only the keys in it: `rollout={top_k: 5}` keeps the other keys of the
        # section, which a file may have set.
        if isinstance(value, Mapping) and isinstance(inner.get(leaf, {}), dict):
            _merge(value, inner.setdefault(leaf, {}))
        else:
            inner[leaf] = value


def _validate(values: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        keys = list(keys_of(Config))
        # All mistakes at once: a start on a cluster may take minutes.
        lines = [explain(mistake, keys) for mistake in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _user_values_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the user set. A saved configuration has them in its entry ``given``;
    without this entry all values count as set by the user.

    Raises:
        ConfigError: if other values in the saved configuration do not follow from ``given``. The
            user may have edited only one of the two parts.
    """
    nested = {}
    _merge(values, nested)
    user_values = nested.pop("given", None)
    if user_values is None:
        return nested
    # A file may have the entry alone. config.yaml has the entry and all values, and the user may
    # have changed only one of the two.
    if nested and _validate(nested) != _validate(user_values):
        raise ConfigError(
            "values differ from those that follow from the entry `given`: "
            "change both, or remove one of the two"
        )
    return user_values


def _parse_value(key: str, text: str) -> Any:
    """Return the value in ``key=text`` on the command line. A key that takes only text gets
    ``text`` itself; for other keys, and for quoted text, ``text`` is read as YAML."""
    field = keys_of(Config).get(key)
    type_text = type_name(field.annotation) if field else ""
    takes_text = type_text in ("str", "str | none")
    # As YAML, "Question: {prompt}" would be a mapping, `no` false, and "#### (.+)" a comment.
    is_yaml = text == "null" or text.startswith(("'", '"'))
    if takes_text and not is_yaml:
        return text
    return read_yaml(text, f"{key}=")


def mask_command_line() -> None:
    """Mask the secrets in arguments ``section.key=value`` of ``sys.argv``, in place."""
    # wandb and starts.jsonl record the command line from sys.argv.
    sys.argv[:] = map(mask_secrets, sys.argv)


def mask_secrets(argument: str) -> str:
    """Return an argument of the command line. If the argument is ``section.key=value``, secrets in
    the value are masked."""
    key, _, text = argument.partition("=")
    if key.split(".")[0] not in Config.model_fields:
        return argument
    value = _parse_value(key, text)
    masked_value = masked(value)
    # An argument without secrets stays as the user wrote it, so that it can be copied.
    if masked_value == value:
        return argument
    return f"{key}={as_yaml(masked_value)}"


def read_config_file(name: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values of a YAML file. A ``ConfigError`` names the file and the mistake in it."""
    file = Path(name).expanduser()
    if file.is_dir() or not file.exists():
        raise ConfigError(f"there is no file {name} (a model is named by model.name_or_path)")
    text = file.read_text(encoding="utf-8")
    values = read_yaml(text, str(name)) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected a mapping of sections, got {type(values).__name__}")
    # `model:` with nothing under it means the section's defaults.
    return {key: value for key, value in values.items() if value is not None}


def read_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text. A ``ConfigError`` names ``source``, the line and the
    problem."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that refuses a repeated key. PyYAML would silently take the last value."""

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key_node, _ in node.value:
            key = key_node.value
            # `<<` merges another mapping, and may occur several times in a mapping.
            is_merge = key_node.tag == "tag:yaml.org,2002:merge"
            if key in keys and not is_merge:
                problem = f"key {key!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(str(key))
        return super().construct_mapping(node, deep)


# PyYAML reads YAML 1.1, in which 1e-6 is a text: a float needs a dot and a sign, 1.0e-6.
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
    default_values: dict[str, Any] | None = None,
) -> tuple[Config, Path | None]:
    """Return the configuration for a command that takes models, and the saved file that it comes
    from.

    A model may be a checkpoint or the output folder of a run. The configuration of that run is then
    read. The file is None with ``config_file``, and if no model belongs to a run.

    Args:
        models: folders or Hub ids. The first model that belongs to a run determines the run.
        config_file: value of ``--config``. Default: the configuration of the run.
        overrides: arguments ``section.key=value``.
        default_values: nested values to begin with if there is neither a ``config_file`` nor a run.
            Default: the defaults of the schema.
    """
    if config_file is not None:
        return load_config(["--config", config_file, *overrides]), None
    for model in models:
        folder = Path(model).expanduser().resolve()
        run = folder
        if folder.name.startswith("checkpoint-"):
            run = folder.parent
        # A checkpoint has the configuration of its run, even if the checkpoint was moved or copied.
        file = folder / "trainer" / "state.json"
        values = None
        if file.is_file():
            values = json.loads(file.read_bytes())["config"]
        else:
            file = run / "config.yaml"
            if file.is_file():
                values = read_config_file(file)
        if values is not None:
            # The folder of the run may have been moved: output_dir is where the folder lies now.
            return load_config([f"output_dir={run}", *overrides], default_values=values), file
    return load_config(overrides, default_values=default_values), None

"""The configuration of the run that a checkpoint belongs to, for the commands that take a model."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo.config.arguments import ConfigError, load_config, read_config_file
from grpo.config.config import Config
from grpo.system import open_regular

STATE, FILE = Path("trainer") / "state.json", "config.yaml"


class SavedConfig(NamedTuple):
    """The configuration that lies with a checkpoint."""

    source: Path
    """The file it was read from."""
    values: dict[str, Any]


def saved_config(model: str | Path) -> SavedConfig | None:
    """The configuration of the run that wrote a model folder; None for any other folder, or a name on the Hub.

    The first of these files: ``trainer/state.json`` in the folder, ``config.yaml`` in the folder, ``config.yaml`` beside a folder that
    is called ``checkpoint-<step>``. As ``output_dir``, the folder where the run lies now takes the place of where it was trained.

    Raises:
        ConfigError: if such a file is damaged.
    """
    folder = Path(model).expanduser()
    folder = folder.resolve() if folder.name in ("", "..") else folder
    run = folder.parent if re.fullmatch(r"checkpoint-\d+", folder.name) else None
    files = [folder / STATE, folder / FILE, *([run / FILE] if run else [])]
    source = next((file for file in files if file.is_file()), None)
    if source is None:
        return None
    values = _config_in_state(source) if source.name == STATE.name else read_config_file(source)
    output_dir = run if run is not None and (run / FILE).is_file() else folder
    return SavedConfig(source, values | {"output_dir": str(output_dir)})


def config_of_models(
    models: Sequence[str], file: str | None, overrides: list[str], *, without_run: dict[str, Any] | None = None
) -> tuple[Config, SavedConfig | None]:
    """The configuration for a command that takes models, and the saved one that it is based on; None if it is based on none.

    Args:
        file: the argument of ``--config``; None: the saved configuration of the first model that has one is taken.
        overrides: ``section.key=value`` of the command line.
        without_run: nested values to begin with if there is neither a file nor a saved configuration; None: the defaults.

    Raises:
        ConfigError: see :func:`load_config` and :func:`saved_config`.
    """
    if file is not None:
        return load_config(["--config", file, *overrides]), None
    saved = next(filter(None, map(saved_config, models)), None)
    if saved:
        try:
            load_config([], default_values=saved.values)
        except ConfigError as error:  # of another version
            raise ConfigError(
                f"{saved.source} does not suit this version: {error}; name one with --config FILE"
            ) from None
    return load_config(overrides, default_values=saved.values if saved else without_run), saved


def _config_in_state(file: Path) -> dict[str, Any]:
    try:
        with open_regular(file) as opened:
            values = json.load(opened)["config"]
        if isinstance(values, dict):
            return values
        reason = "its config is not a mapping"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ConfigError(f"{file} holds no configuration that can be read ({reason}): name one with --config FILE")

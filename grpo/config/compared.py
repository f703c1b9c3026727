"""Settings by key, and which are compared: between ranks, with a run that continues, in a sweep."""

from pathlib import Path
from typing import Any

from grpo.config.config import Config
from grpo.config.help import keys_of


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """The values of nested dictionaries by dotted key. The value of a configuration's key may be a
    dictionary itself."""
    if not isinstance(value, dict) or key in keys_of(Config):
        return {key: value}

    found = {}
    for name, inner in value.items():
        found |= flat(inner, f"{key}.{name}" if key else str(name))
    return found


def settings_but(mark: str, config: Config) -> dict[str, Any]:
    """The settings as they are written, by key, without those that have this mark of the schema."""
    fields = keys_of(Config)
    settings = flat(config.for_writing()).items()
    return {key: value for key, value in settings if mark not in fields[key].metadata}


def settings_of_all_ranks(config: Config) -> dict[str, Any]:
    """The settings that all ranks need to share. The names of a user's functions are without the
    folder of their file, whose content is compared elsewhere."""
    settings = settings_but("may differ between the machines of a run", config)
    for key in ("algorithm.objective", "algorithm.advantages"):
        settings[key] = Path(settings[key] or "").name
    for function in settings["reward.functions"]:
        function["name"] = Path(function["name"]).name
    return settings

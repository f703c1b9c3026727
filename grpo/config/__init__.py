"""The configuration of a run: its schema, how YAML and ``section.key=value`` fill it, and checks across sections. Imports no torch."""

from grpo.config.agreement import check_world_size
from grpo.config.arguments import ConfigError
from grpo.config.presets import PRESETS
from grpo.config.schema import Config, DataConfig, EvalConfig, OptimConfig, RuntimeConfig, help_text, load_config

__all__ = [
    "PRESETS",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "OptimConfig",
    "RuntimeConfig",
    "check_world_size",
    "help_text",
    "load_config",
]

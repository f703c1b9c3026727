"""Configuration of a run: its keys, their checks, and how YAML and ``section.key=value`` set the
keys. The package does not import torch."""

from grpo.config.algorithm import PRESETS, AlgorithmConfig
from grpo.config.arguments import (
    ConfigError,
    config_of_models,
    load_config,
    make_config,
    mask_command_line,
    mask_secrets,
)  # fmt: skip
from grpo.config.compared import flat, settings_except, settings_of_all_ranks
from grpo.config.config import Config, check_world_size
from grpo.config.effects import keys_without_effect
from grpo.config.help import KEYS_EPILOG, keys_of, unknown_key
from grpo.config.schema import (
    DataConfig,
    EvalConfig,
    OptimConfig,
    RuntimeConfig,
)  # fmt: skip

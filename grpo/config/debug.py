"""What ``--debug`` makes of a configuration: a run of two small steps in one process."""

from typing import Any

from grpo.config.config import Config

LARGEST: dict[str, dict[str, int]] = {
    "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 64},
    "data": {"max_train_samples": 32, "max_eval_samples": 4},
    "optim": {"max_steps": 2},
    "eval": {"num_samples": 1, "max_samples": 4},
    "logging": {"every": 1},
}
"""Values above these, or unset, become these."""
REPLACED: dict[str, dict[str, Any]] = {
    "checkpoint": {"resume": "never", "save_steps": None, "keep_best": None},
    "logging": {"wandb": "disabled"},
}


def debug_variant(config: Config) -> Config:
    """The same configuration with small sizes and a folder of its own, ``<output_dir>-debug``."""
    values = config.model_dump()
    for section, keys in LARGEST.items():
        for key, largest in keys.items():
            value = values[section][key]
            values[section][key] = largest if value is None else min(value, largest)
    for section, keys in REPLACED.items():
        values[section] |= keys
    minibatches = config.algorithm.num_minibatches
    values["rollout"]["prompts_per_step"] = max(values["rollout"]["prompts_per_step"] // minibatches, 1) * minibatches
    folder = config.output_dir.rstrip("/")
    if not (config.debug and folder.endswith("-debug")):  # that is the configuration of a debug run, read again
        folder = f"{folder}-debug"
    return Config.model_validate(values | {"debug": True, "output_dir": folder})

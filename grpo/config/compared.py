"""Settings by key, and which settings may differ between ranks or change when a run continues."""

from pathlib import Path
from typing import Any

from grpo.config.config import Config
from grpo.config.help import keys_of

MAY_DIFFER = {
    # Paths, addresses and devices. Instead of paths, the contents of files are compared.
    "may differ between the machines of a run": """
        output_dir model.name_or_path model.adapter model.reference data.dataset data.eval_dataset
        rollout.server rollout.vllm_command rollout.weights_folder checkpoint.resume runtime.device
        runtime.threads_per_rank
    """,
    # Keys that say where, how fast or how long a run computes, and what the run saves: training
    # stays the same up to rounding. Evaluations change no weight. Options of vLLM's servers can
    # change what is sampled, but a server may have to be replaced.
    "may change when a run continues": """
        output_dir model.gradient_checkpointing reward.timeout_s reward.num_workers eval
        rollout.tokens_in_flight rollout.server rollout.vllm_command rollout.weights_folder
        optim.tokens_per_microbatch checkpoint logging runtime.device runtime.parallel
        runtime.shard_size runtime.offload runtime.fast_decode runtime.timeout_s
        runtime.deterministic runtime.threads_per_rank runtime.try_largest_step
    """,
}
"""Keys whose values may differ, for each situation. The name of a section stands for all its keys.
A key that is not listed must not differ."""


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted key."""
    # The value of a configuration's key may be a dictionary itself, such as chat_template_kwargs.
    if not isinstance(value, dict) or key in keys_of(Config):
        return {key: value}

    values = {}
    for name, inner in value.items():
        values |= flat(inner, f"{key}.{name}" if key else str(name))
    return values


def settings_except(entry: str, config: Config) -> dict[str, Any]:
    """Return the settings by key, with secrets masked, except the settings that
    ``MAY_DIFFER[entry]`` lists."""
    exceptions = MAY_DIFFER[entry].split()
    return {
        key: value
        for key, value in flat(config.masked_values()).items()
        if key not in exceptions and key.partition(".")[0] not in exceptions
    }


def settings_of_all_ranks(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks."""
    settings = settings_except("may differ between the machines of a run", config)
    # Machines may keep the files of a user's functions in different folders. The contents of these
    # files are compared by their digests.
    for key in ("algorithm.objective", "algorithm.advantages", "algorithm.loop"):
        settings[key] = Path(settings[key] or "").name
    for function in settings["reward.functions"]:
        function["name"] = Path(function["name"]).name
    return settings

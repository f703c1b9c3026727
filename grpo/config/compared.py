"""Settings by key, and where their values may differ: between ranks, when a run continues, in a
sweep."""

from pathlib import Path
from typing import Any

from grpo.config.config import Config
from grpo.config.help import keys_of

# Where, how fast or how long a run is computed, and what is kept of it: the results are the same up
# to rounding.
SAME_RESULTS = """
    output_dir model.gradient_checkpointing reward.timeout_s reward.num_workers
    rollout.tokens_in_flight rollout.weights_folder optim.tokens_per_microbatch checkpoint logging
    runtime.device runtime.parallel runtime.shard_size runtime.offload runtime.fast_decode
    runtime.timeout_s runtime.deterministic runtime.threads_per_rank runtime.try_largest_step
"""
# Evaluations, and vLLM's servers, whose options can change what is sampled. A run may continue with
# another value, but results compare only between runs with the same one.
SAME_RUN = "eval rollout.server rollout.vllm_command"
MAY_DIFFER = {
    # Paths, addresses and devices. Of files, the contents are compared in place of the paths.
    "may differ between the machines of a run": """
        output_dir model.name_or_path model.adapter model.reference data.dataset data.eval_dataset
        rollout.server rollout.vllm_command rollout.weights_folder checkpoint.resume runtime.device
        runtime.threads_per_rank
    """,
    "may change when a run continues": SAME_RESULTS + SAME_RUN,
    "may differ between runs that are compared": SAME_RESULTS,
}
"""Keys and whole sections whose values may differ. The others are compared everywhere."""


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
    """The settings as they are written, by key, without those of this entry of ``MAY_DIFFER``."""
    left_out = MAY_DIFFER[mark].split()
    settings = {}
    for key, value in flat(config.for_writing()).items():
        section = key.partition(".")[0]
        if key not in left_out and section not in left_out:
            settings[key] = value
    return settings


def settings_of_all_ranks(config: Config) -> dict[str, Any]:
    """The settings that all ranks need to share. The names of a user's functions are without the
    folder of their file, whose content is compared elsewhere."""
    settings = settings_but("may differ between the machines of a run", config)
    for key in ("algorithm.objective", "algorithm.advantages"):
        settings[key] = Path(settings[key] or "").name
    for function in settings["reward.functions"]:
        function["name"] = Path(function["name"]).name
    return settings

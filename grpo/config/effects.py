"""Keys that have no effect because of the values of other keys."""

from grpo.config.compared import flat
from grpo.config.config import Config

WITHOUT_EFFECT = {
    "algorithm.name=gdpo": "algorithm.baseline algorithm.scale",
    "algorithm.objective=sapo": "algorithm.epsilon algorithm.epsilon_high",
    "algorithm.objective=reinforce": "algorithm.epsilon algorithm.epsilon_high",
    "algorithm.scale=none": "algorithm.advantage_eps",
    "algorithm.sampler_correction=none": "algorithm.sampler_correction_min algorithm.sampler_correction_max",
    "algorithm.beta=0.0": (
        "algorithm.kl_estimator algorithm.unbiased_kl algorithm.ref_sync_steps algorithm.ref_sync_alpha model.reference"
    ),
    "algorithm.ref_sync_steps=0": "algorithm.ref_sync_alpha",
    "rollout.engine=builtin": "rollout.server rollout.vllm_command rollout.weights_folder",
    "rollout.engine=vllm": "rollout.tokens_in_flight runtime.fast_decode",
    "eval.temperature=0.0": "eval.num_samples eval.top_p eval.top_k eval.min_p",
    "data.eval_split=None": (
        "data.eval_dataset data.max_eval_samples eval.every eval.before_training eval.num_samples eval.temperature "
        "eval.top_p eval.top_k eval.min_p eval.max_completion_length eval.max_samples eval.correct_above"
    ),
    "model.disable_dropout=True": "lora.dropout",
    "runtime.precision=fp32": "lora.base_precision",
    "checkpoint.resume=never": "checkpoint.accept_changes",
}
"""``key=value`` -> the keys that have no effect with it."""
GENERATED = ("builtin:", "environment:", "python:")
WITHOUT_SPLITS = (*GENERATED, "reasoning_gym:")
"""Beginnings of ``data.dataset`` for rows that are generated, or passed by a program."""
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of ``data.dataset`` for files."""


def keys_without_effect(config: Config) -> dict[str, str]:
    """The keys that the user changed without any effect -> the reason.

    A key that has its default value is not among them, since it does no harm.
    """
    algorithm = config.algorithm
    data = config.data
    rollout = config.rollout
    logging = config.logging
    objective = algorithm.objective
    # dppo_tv applies the same keys to the sampler's probabilities, and the user's own objective may
    # use them in its own way.
    clips_ratio = objective in ("clip", "cispo")
    # Dynamic sampling compares rewards as baseline and scale say, with any advantages.
    replaces_advantages = algorithm.advantages and not algorithm.dynamic_sampling
    train_rows = data.dataset
    eval_rows = data.eval_dataset or train_rows
    is_local = train_rows.startswith(GENERATED) or train_rows.endswith(FILE_SUFFIXES)
    conditions = [
        (objective != "clip", f"with algorithm.objective={objective}", "algorithm.delta"),
        (
            clips_ratio and algorithm.updates_per_step == 1,
            "with one update a rollout, where the importance ratio is 1",
            "algorithm.epsilon algorithm.epsilon_high algorithm.delta",
        ),
        (
            # With unbiased_kl the ratio weights the KL.
            objective == "reinforce" and not algorithm.unbiased_kl,
            "with algorithm.objective=reinforce",
            "algorithm.importance_level",
        ),
        (
            objective == "cispo" and algorithm.epsilon_high is not None,
            "with algorithm.objective=cispo and algorithm.epsilon_high",
            "algorithm.epsilon",
        ),
        (
            replaces_advantages,
            "with algorithm.advantages",
            "algorithm.baseline algorithm.scale algorithm.advantage_eps",
        ),
        (
            replaces_advantages and algorithm.name == "gdpo",
            "on advantages of algorithm.advantages",
            "algorithm.name",
        ),
        (
            not config.uses_lora,
            "without lora.rank",
            "lora.alpha lora.dropout lora.target_modules lora.rslora lora.init lora.base_precision",
        ),
        (
            config.model.adapter,
            "with model.adapter, which has its own",
            "lora.rank lora.alpha lora.target_modules lora.rslora lora.init",
        ),
        (
            train_rows.startswith(WITHOUT_SPLITS),
            f"with data.dataset={train_rows}",
            "data.train_split",
        ),
        (
            eval_rows.startswith(WITHOUT_SPLITS) and data.eval_split,
            f"with rows of {eval_rows}",
            "data.eval_split",
        ),
        (
            is_local and not data.eval_dataset,
            f"with data.dataset={train_rows}",
            "data.config_name",
        ),
        (
            not config.tools and not config.environment,
            "without tools or environment",
            "tools_format rollout.max_turns rollout.max_tool_tokens",
        ),
        (rollout.addresses, "with rollout.server=ADDRESS", "rollout.vllm_command"),
        (config.optim.max_steps, "with optim.max_steps", "optim.num_epochs"),
        (
            logging.wandb == "disabled" and not logging.trackio,
            "without logging.wandb or logging.trackio",
            "logging.project",
        ),
    ]
    for key, value in flat(config.model_dump(mode="json")).items():
        setting = f"{key}={value}"
        if setting in WITHOUT_EFFECT:
            conditions.append((True, f"with {setting}", WITHOUT_EFFECT[setting]))

    defaults = flat(Config().model_dump(mode="json"))
    changed = [key for key, value in flat(config.given).items() if value != defaults.get(key)]
    found: dict[str, str] = {}
    for holds, reason, keys in conditions:
        for key in keys.split():
            if holds and key in changed:
                found.setdefault(key, reason)
    return found

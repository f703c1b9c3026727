"""Keys that have no effect because of the values of other keys."""

from grpo.config.algorithm import is_user_function
from grpo.config.compared import flat
from grpo.config.config import Config

NO_EFFECT_WITH = {
    # GDPO normalizes each reward within its group, then the sum over the batch.
    "algorithm.name=gdpo": "algorithm.baseline algorithm.scale",
    "algorithm.objective=sapo": "algorithm.epsilon algorithm.epsilon_high",
    "algorithm.objective=reinforce": "algorithm.epsilon algorithm.epsilon_high",
    "algorithm.scale=none": "algorithm.advantage_eps",
    "algorithm.sampler_correction=none": (
        "algorithm.sampler_correction_min algorithm.sampler_correction_max"
    ),
    # Without a KL term there is no reference model that could be moved.
    "algorithm.beta=0.0": (
        "algorithm.kl_estimator algorithm.unbiased_kl algorithm.ref_sync_steps "
        "algorithm.ref_sync_alpha model.reference"
    ),
    "algorithm.ref_sync_steps=0": "algorithm.ref_sync_alpha",
    "rollout.engine=builtin": "rollout.server rollout.vllm_command rollout.weights_folder",
    "rollout.engine=vllm": "rollout.tokens_in_flight runtime.fast_decode",
    # Greedy completions of one problem are equal, so one is sampled. There is no entry for
    # data.eval_split=none: who writes it, as --debug does, knows that it turns evaluations off.
    "eval.temperature=0.0": "eval.num_samples eval.top_p eval.top_k eval.min_p",
    # The dropout of adapters is set to 0 too.
    "model.disable_dropout=True": "lora.dropout",
    "runtime.precision=fp32": "lora.base_precision",
    # A new run has nothing that could have changed.
    "checkpoint.resume=never": "checkpoint.accept_changes",
}
"""Keys that lose their effect, by the setting ``key=value`` that removes the effect."""
GENERATED_PREFIXES = ("builtin:", "environment:", "python:")
"""Prefixes of ``data.dataset`` for rows that are generated, or passed by a program."""
PREFIXES_WITHOUT_SPLITS = (*GENERATED_PREFIXES, "reasoning_gym:")
"""Prefixes of ``data.dataset`` for rows without named splits."""
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of ``data.dataset`` for files."""


def keys_without_effect(config: Config) -> dict[str, str]:
    """Return the keys that the user changed and that have no effect, with the reason.

    A key with its default value is left out, since it does no harm.
    """
    algorithm = config.algorithm
    data = config.data
    logging = config.logging
    objective = algorithm.objective
    # dppo_tv applies epsilon and epsilon_high to changes of probabilities, and a user's objective
    # may use the keys in any way.
    clips_ratio = objective in ("clip", "cispo")
    # Dynamic sampling finds equal rewards by baseline and scale, also with a user's advantages.
    replaces_advantages = algorithm.advantages and not algorithm.dynamic_sampling
    train_rows = data.dataset
    eval_rows = data.eval_dataset or train_rows
    is_local = train_rows.startswith(GENERATED_PREFIXES) or train_rows.endswith(FILE_SUFFIXES)
    keys_without_function = [
        key for key in algorithm.own_args if not is_user_function(str(getattr(algorithm, key)))
    ]
    conditions = [
        (
            keys_without_function,
            f"for {', '.join(keys_without_function)}, which names no function of yours",
            "algorithm.own_args",
        ),
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
            # CISPO's weight has only an upper bound, epsilon_high. Its default is epsilon.
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
            # The adapter's shape is read from its folder. Dropout is no part of the shape.
            config.model.adapter,
            "with model.adapter, which has its own",
            "lora.rank lora.alpha lora.target_modules lora.rslora lora.init",
        ),
        (
            train_rows.startswith(PREFIXES_WITHOUT_SPLITS),
            f"with data.dataset={train_rows}",
            "data.train_split",
        ),
        (
            # eval_split=none turns evaluations off with rows of any kind.
            eval_rows.startswith(PREFIXES_WITHOUT_SPLITS) and data.eval_split,
            f"with rows of {eval_rows}",
            "data.eval_split",
        ),
        (
            # With eval_dataset, config_name may be the configuration of that dataset.
            is_local and not data.eval_dataset,
            f"with data.dataset={train_rows}",
            "data.config_name",
        ),
        (
            not config.uses_turns,
            "without tools or environment",
            "tools_format rollout.max_turns rollout.max_tool_tokens",
        ),
        # Servers with given addresses run already, so no command starts them.
        (config.rollout.addresses, "with rollout.server=ADDRESS", "rollout.vllm_command"),
        (config.optim.max_steps, "with optim.max_steps", "optim.num_epochs"),
        (
            logging.wandb == "disabled" and not logging.trackio,
            "without logging.wandb or logging.trackio",
            "logging.project",
        ),
    ]
    for key, value in flat(config.model_dump(mode="json")).items():
        setting = f"{key}={value}"
        # A loss of the user may ask for the log-probs of the reference at beta 0.
        is_asked_for = key == "algorithm.beta" and is_user_function(objective)
        if setting in NO_EFFECT_WITH and not is_asked_for:
            conditions.append((True, f"with {setting}", NO_EFFECT_WITH[setting]))

    # Presets and other keys may set keys without effect too. The user is told only of keys that the
    # user set.
    defaults = flat(Config().model_dump(mode="json"))
    user_values = flat(config.user_values)
    changed = [key for key, value in user_values.items() if value != defaults.get(key)]
    reasons = {}
    for holds, reason, keys in conditions:
        for key in keys.split():
            # A key may have several reasons. The user is told the first one.
            if holds and key in changed:
                reasons.setdefault(key, reason)
    return reasons

"""Configuration of a run: all sections, values that other settings imply, checks across sections,
``--debug``."""

import math
from operator import attrgetter
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic_core import to_jsonable_python

from grpo.config import schema
from grpo.config.algorithm import AlgorithmConfig
from grpo.config.secrets import masked

ENVIRONMENT_ROWS = "environment:prompts"
"""Value of ``data.dataset`` if the reset of an environment makes the prompts. The rows of the
dataset are then seeds."""


class Config(schema.Section):
    output_dir: schema.Folder = "runs/default"
    """Folder of the run: config.yaml, metrics.jsonl, completions/, checkpoint-<step>/."""
    seed: int = Field(0, ge=0, lt=2**63)
    """All random numbers of the run are derived from this seed."""
    model: schema.ModelConfig = schema.ModelConfig()
    lora: schema.LoraConfig = schema.LoraConfig()
    data: schema.DataConfig = schema.DataConfig()
    tools: list[schema.Tool] = []
    """Functions that the model may call (docs/tools.md): a list of {name, args}, or of names
    alone."""
    tools_format: Literal["auto", "tags"] = "auto"
    """Format in which the model's tool calls are read. auto: the format of the chat template, and
    tags. tags: <NAME>argument</NAME> for a tool with one argument, <NAME>{..}</NAME> with a JSON
    object of the arguments for another, or <tool_call>{"name": .., "arguments": {..}}</tool_call>
    for any tool."""
    environment: str | None = None
    """Class of an environment (path/to/file.py:Class), either in TRL's form or with the methods
    reset and step. Default: no environment."""
    reward: schema.RewardConfig = schema.RewardConfig()
    rollout: schema.RolloutConfig = schema.RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: schema.OptimConfig = schema.OptimConfig()
    eval: schema.EvalConfig = schema.EvalConfig()
    checkpoint: schema.CheckpointConfig = schema.CheckpointConfig()
    logging: schema.LoggingConfig = schema.LoggingConfig()
    runtime: schema.RuntimeConfig = schema.RuntimeConfig()
    # Not a key: the saved configuration of a debug run would start another debug run.
    _debug: bool = PrivateAttr(False)

    @property
    def debug(self) -> bool:
        """True with ``--debug``: one process, a few prompts, 2 steps, everything printed and
        checked."""
        return self._debug

    @property
    def uses_turns(self) -> bool:
        """True if completions may have several turns, with tool results in between."""
        return bool(self.tools or self.environment)

    @property
    def uses_lora(self) -> bool:
        """True if an adapter is trained, and the weights of the model are frozen."""
        return bool(self.lora.rank or self.model.adapter)

    @property
    def user_values(self) -> dict[str, Any]:
        """Nested values that the user set, without values that a preset or another key implies."""
        values = self.model_dump(exclude_unset=True)
        reward = values.get("reward", {})
        if "functions" in reward:
            # A reward function that a preset added has no fields set, so it is empty here.
            reward["functions"] = [function for function in reward["functions"] if function]
        return values

    def masked_values(self) -> dict[str, Any]:
        """Return all values by section in JSON types, with secrets masked. This is what files and
        wandb get."""
        return masked(self.model_dump(mode="json"))

    def values_to_save(self) -> dict[str, Any]:
        """Return :meth:`masked_values`, with :attr:`user_values` in the entry ``given``. A run with
        the saved file as ``--config`` begins from this entry."""
        # Converted only here: make_config needs the Python types of user_values, because a reward's
        # argument may be a tuple, or a mapping with integer keys.
        user_values = to_jsonable_python(self.user_values)
        return self.masked_values() | {"given": masked(user_values)}

    @model_validator(mode="after")
    def _add_implied_values(self) -> Self:
        for key, value in _implied_values(self).items():
            name, leaf = key.split(".")
            section = getattr(self, name)
            changed = section.model_copy(update={leaf: value})
            # An implied value does not count as set by the user: a later run computes it again.
            changed.model_fields_set.intersection_update(section.model_fields_set)
            object.__setattr__(self, name, changed)  # a plain assignment is refused
        return self

    @model_validator(mode="after")
    def _check_sections_together(self) -> Self:
        """Raise a ValueError if settings of several keys do not fit together. The message says what
        would work."""
        # Validators run in the order of this class, so the implied values are set by now.
        algorithm = self.algorithm
        data = self.data
        optim = self.optim
        rollout = self.rollout
        runtime = self.runtime

        # With one completion per group, every reward equals the mean, and nothing would be learned.
        compares = algorithm.baseline != "none" or algorithm.scale in ("group", "mean")
        if rollout.num_generations == 1 and compares and not algorithm.advantages:
            raise ValueError(
                "rollout.num_generations=1 leaves nothing to compare with: "
                "use num_generations >= 2, or algorithm.baseline=none with algorithm.scale=none"
            )
        # From the second update on, REINFORCE would need the importance ratio that it lacks.
        if algorithm.objective == "reinforce" and algorithm.updates_per_step > 1:
            raise ValueError(
                "algorithm.objective=reinforce takes one update per rollout: use objective=clip, "
                "or num_iterations=1 and num_minibatches=1"
            )
        # DPPO compares single probabilities with the sampler's: a correction would count the
        # difference a second time.
        correction = algorithm.sampler_correction
        is_plain = algorithm.importance_level == "token" and correction == "none"
        if algorithm.objective == "dppo_tv" and not is_plain:
            raise ValueError(
                "algorithm.objective=dppo_tv needs importance_level=token "
                "and sampler_correction=none"
            )
        # The default bounds are made for the ratio of a token, and would mask no completion.
        bounds = {"sampler_correction_min", "sampler_correction_max"}
        if correction == "geometric_mask" and not bounds <= algorithm.model_fields_set:
            raise ValueError(
                "algorithm.sampler_correction=geometric_mask needs both bounds: "
                "set sampler_correction_min=0.99 and sampler_correction_max=1.01 for example"
            )
        # Otherwise tokens on which trainer and sampler agree would be weighted or masked too.
        low = algorithm.sampler_correction_min or 0
        high = algorithm.sampler_correction_max or math.inf
        if not low <= 1 <= high:
            raise ValueError(
                "algorithm.sampler_correction_min and _max must lie around 1, "
                "the ratio where trainer and sampler agree"
            )
        if not self.reward.functions and not self.environment:
            raise ValueError(
                "reward.functions=[]: give at least 1, or an environment that gives a reward"
            )
        # The template is the full text of a prompt, so these keys would be ignored.
        has_messages = data.system_prompt or data.question_template or data.few_shot
        if data.prompt_template and has_messages:
            raise ValueError(
                "data.prompt_template takes no system_prompt, question_template and few_shot"
            )
        # With a minimum, grpo.run.optimizer takes the cosine schedule with one. Any other schedule
        # would become a cosine.
        is_cosine = optim.lr_scheduler_type in ("cosine", "cosine_with_min_lr")
        if optim.min_lr is not None and not is_cosine:
            raise ValueError(
                f"optim.min_lr needs lr_scheduler_type=cosine, got {optim.lr_scheduler_type}"
            )
        # A schedule with a minimum above its peak would rise.
        if (optim.min_lr or 0) > optim.learning_rate:
            raise ValueError(
                f"optim.min_lr={optim.min_lr} is above optim.learning_rate={optim.learning_rate}"
            )
        # DDP would ignore these settings, and a model that needs them would run out of memory.
        needs_fsdp = runtime.shard_size or runtime.offload != "none"
        if needs_fsdp and runtime.parallel != "fsdp":
            raise ValueError("runtime.shard_size and runtime.offload need runtime.parallel=fsdp")
        # An adapter is a product of two matrices, and the average of two adapters is no such
        # product. Another reference model has no adapter to replace.
        moves_adapter = self.uses_lora and algorithm.ref_sync_steps > 0
        if moves_adapter and (algorithm.ref_sync_alpha != 1 or self.model.reference):
            raise ValueError(
                "algorithm.ref_sync_steps with LoRA copies the adapter: algorithm.ref_sync_alpha "
                "must be 1, and model.reference none"
            )
        return self


def _implied_values(config: Config) -> dict[str, Any]:
    """Return the values that other keys imply, by key. A key that the user set keeps its value."""
    data = config.data
    algorithm = config.algorithm
    sets_rewards = "functions" in config.reward.model_fields_set
    implied = {}
    if config.environment:
        if "dataset" not in data.model_fields_set or data.dataset == "none":
            implied["data.dataset"] = ENVIRONMENT_ROWS
        # The default, accuracy, needs an answer column. An environment gives its own rewards.
        if not sets_rewards:
            implied["reward.functions"] = []
    elif data.dataset.startswith("reasoning_gym:") and not sets_rewards:
        implied["reward.functions"] = [schema.RewardFunction(name="reasoning_gym")]
        # The scorer gives 1 for a right answer and less for a partly right one.
        if "correct_above" not in config.eval.model_fields_set:
            implied["eval.correct_above"] = 0.99

    # vLLM computes other log-probs than the trainer: truncated weights (TIS) correct the
    # difference. The objective dppo_tv needs no correction, since it compares with the sampler's
    # probabilities.
    sets_correction = "sampler_correction" in algorithm.model_fields_set
    if config.rollout.engine == "vllm" and algorithm.objective != "dppo_tv" and not sets_correction:
        implied["algorithm.sampler_correction"] = "token_truncate"

    # DAPO's soft overlong punishment is a reward. The paper punishes the last 4,096 of 20,480
    # tokens, a fifth.
    functions = implied.get("reward.functions", config.reward.functions)
    names = [function.name for function in functions]
    length = config.rollout.max_completion_length
    if algorithm.name == "dapo" and functions and "soft_overlong" not in names and length >= 5:
        args = {"max_length": length, "cache_length": length // 5}
        # No field of this entry counts as set. So user_values can tell the entry from the user's
        # functions.
        punishment = schema.RewardFunction.model_construct(set(), name="soft_overlong", args=args)
        implied["reward.functions"] = [*functions, punishment]
    return implied


def check_world_size(config: Config, world_size: int) -> None:
    """Check that ``world_size`` processes can share a step evenly, and that ``runtime`` and
    ``--debug`` allow so many processes.

    Raises:
        ValueError: if ``world_size`` does not fit. The message names the setting to change.
    """
    prompts = config.rollout.prompts_per_step
    minibatches = config.algorithm.num_minibatches
    runtime = config.runtime
    # Every minibatch has the same number of problems from every rank.
    unit = world_size * minibatches
    if prompts % unit:
        raise ValueError(
            f"rollout.prompts_per_step={prompts} is not a multiple of {world_size} processes x "
            f"algorithm.num_minibatches={minibatches}: "
            f"use prompts_per_step={prompts // unit * unit + unit}"
        )
    # A single process shards nothing. So a configuration for several processes can be tried on one.
    if runtime.shard_size and world_size > 1 and world_size % runtime.shard_size:
        raise ValueError(
            f"runtime.shard_size={runtime.shard_size} does not divide {world_size} processes"
        )
    # Only FSDP offloads, and one process trains without FSDP: the model would stay on the GPU.
    if world_size == 1 and runtime.offload != "none" and not config.debug:
        raise ValueError(f"runtime.offload={runtime.offload} needs at least 2 processes")
    if config.debug and world_size > 1:
        raise ValueError(
            f"--debug is single-process, but {world_size} processes were started: "
            "use nproc_per_node=1"
        )


# A debug run starts at step 0, leaves no checkpoints, and appears on no dashboard.
DEBUG_VALUES = {
    "checkpoint.resume": "never",
    "checkpoint.save_steps": None,
    "checkpoint.keep_best": None,
    "eval.before_training": False,  # what the model does is printed first
    "eval.max_completion_length": None,
    "logging.wandb": "disabled",
    "logging.trackio": False,
    "logging.tensorboard": False,
}
"""Values that ``--debug`` gives to keys."""
DEBUG_UPPER_BOUNDS = {
    "rollout.prompts_per_step": 2,
    "rollout.num_generations": 4,
    "rollout.max_completion_length": 64,
    "data.max_train_samples": 32,
    "data.max_eval_samples": 4,
    "optim.max_steps": 2,
    "eval.num_samples": 1,
    "eval.max_samples": 4,
    "logging.every": 1,
}
"""Upper bounds of keys with ``--debug``. A key without a value gets the bound as its value."""


def debug_changes(config: Config) -> dict[str, Any]:
    """Return the keys that ``--debug`` sets, with their values: two small steps in one process, in
    ``<output_dir>-debug``."""
    changes = DEBUG_VALUES | {"output_dir": f"{config.output_dir.rstrip('/')}-debug"}
    for key, upper_bound in DEBUG_UPPER_BOUNDS.items():
        changes[key] = min(attrgetter(key)(config) or upper_bound, upper_bound)
    if config.uses_turns:
        # Else a conversation would end before it has shown what the model does with an answer.
        del changes["rollout.max_completion_length"]
    # Each minibatch needs one problem at least.
    changes["rollout.prompts_per_step"] = max(
        changes["rollout.prompts_per_step"],
        config.algorithm.num_minibatches,
    )
    return changes

"""The whole configuration: all sections, values that other settings imply, checks between sections,
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
"""In place of a dataset's name: the prompts are those of an environment's reset, and the rows are
seeds."""


class Config(schema.Section):
    output_dir: schema.Folder = "runs/default"
    """Folder of the run: config.yaml, metrics.jsonl, completions/, checkpoint-<step>/."""
    seed: int = Field(0, ge=0, lt=2**63)
    """All random numbers of the run are derived from this one."""
    model: schema.ModelConfig = schema.ModelConfig()
    lora: schema.LoraConfig = schema.LoraConfig()
    data: schema.DataConfig = schema.DataConfig()
    tools: list[schema.Tool] = []
    """Functions that the model may call (docs/tools.md): a list of {name, args}, or of names
    alone."""
    tools_format: Literal["auto", "tags"] = "auto"
    """Form of calls. auto: that of the tokenizer's response template; without one, that in which
    the chat template writes them, and tags. tags: the tool's only argument between <NAME> and
    </NAME>, or {"name": .., "arguments": {..}} between <tool_call> and </tool_call>."""
    environment: str | None = None
    """Class of an environment (path/to/file.py:Class), of TRL's or of reset/step form."""
    reward: schema.RewardConfig = schema.RewardConfig()
    rollout: schema.RolloutConfig = schema.RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: schema.OptimConfig = schema.OptimConfig()
    eval: schema.EvalConfig = schema.EvalConfig()
    checkpoint: schema.CheckpointConfig = schema.CheckpointConfig()
    logging: schema.LoggingConfig = schema.LoggingConfig()
    runtime: schema.RuntimeConfig = schema.RuntimeConfig()
    _debug: bool = PrivateAttr(False)

    @property
    def debug(self) -> bool:
        """True with ``--debug``: one process, a few prompts, 2 steps, everything printed and
        checked."""
        return self._debug

    @property
    def uses_turns(self) -> bool:
        """True if completions may have several turns."""
        return bool(self.tools or self.environment)

    @property
    def uses_lora(self) -> bool:
        """True if an adapter is trained, and the model's own weights are frozen."""
        return bool(self.lora.rank or self.model.adapter)

    @property
    def given(self) -> dict[str, Any]:
        """The values that the user set, nested, without those that a preset or another key
        implies."""
        values = self.model_dump(exclude_unset=True)
        reward = values.get("reward", {})
        if "functions" in reward:
            # The function that a preset added has no fields set, so it is empty here.
            reward["functions"] = [function for function in reward["functions"] if function]
        return values

    def for_writing(self) -> dict[str, Any]:
        """The values as they are written to files and sent to wandb: JSON types, secrets masked."""
        return masked(self.model_dump(mode="json"))

    def for_saving(self) -> dict[str, Any]:
        """:meth:`for_writing`, and :attr:`given` as the entry ``given``, from which a later run
        begins."""
        return self.for_writing() | {"given": masked(to_jsonable_python(self.given))}

    @model_validator(mode="after")
    def _add_implied(self) -> Self:
        for key, value in _implied_values(self).items():
            name, leaf = key.split(".")
            section = getattr(self, name)
            changed = section.model_copy(update={leaf: value})
            # An implied value does not count as set by the user.
            changed.model_fields_set.intersection_update(section.model_fields_set)
            object.__setattr__(self, name, changed)  # frozen for others
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        for is_wrong, mistake in _refusals(self):
            if is_wrong:
                raise ValueError(mistake)
        return self


def _refusals(config: Config) -> list[tuple[Any, str]]:
    """Mistakes that concern several keys: ``(is it made?, what would work)``."""
    algorithm = config.algorithm
    data = config.data
    optim = config.optim
    rollout = config.rollout
    runtime = config.runtime
    correction = algorithm.sampler_correction
    compares = algorithm.baseline != "none" or algorithm.scale in ("group", "mean")
    moves_adapter = config.uses_lora and algorithm.ref_sync_steps > 0
    needs_fsdp = runtime.shard_size or runtime.offload != "none"
    return [
        (
            rollout.num_generations == 1 and compares and not algorithm.advantages,
            "rollout.num_generations=1 leaves nothing to compare with: use num_generations >= 2, or "
            "algorithm.baseline=none with algorithm.scale=none",
        ),
        (
            algorithm.objective == "reinforce" and algorithm.updates_per_step > 1,
            "algorithm.objective=reinforce takes one update per rollout: use objective=clip, or num_iterations=1 and "
            "num_minibatches=1",
        ),
        (
            algorithm.objective == "dppo_tv"
            and (algorithm.importance_level != "token" or correction != "none"),
            "algorithm.objective=dppo_tv needs importance_level=token and sampler_correction=none",
        ),
        (
            correction == "geometric_mask"
            and not {"sampler_correction_min", "sampler_correction_max"}
            <= algorithm.model_fields_set,
            "algorithm.sampler_correction=geometric_mask needs both bounds: set sampler_correction_min=0.99 and "
            "sampler_correction_max=1.01 for example",
        ),
        (
            not (algorithm.sampler_correction_min or 0)
            <= 1
            <= (algorithm.sampler_correction_max or math.inf),
            "algorithm.sampler_correction_min and _max must lie around 1, the ratio where trainer and sampler agree",
        ),
        (
            not config.reward.functions and not config.environment,
            "reward.functions=[]: give at least 1, or an environment that gives a reward",
        ),
        (
            data.prompt_template
            and (data.system_prompt or data.question_template or data.few_shot),
            "data.prompt_template takes no system_prompt, question_template and few_shot",
        ),
        (
            optim.min_lr is not None
            and optim.lr_scheduler_type not in ("cosine", "cosine_with_min_lr"),
            f"optim.min_lr needs lr_scheduler_type=cosine, got {optim.lr_scheduler_type}",
        ),
        (
            (optim.min_lr or 0) > optim.learning_rate,
            f"optim.min_lr={optim.min_lr} is above optim.learning_rate={optim.learning_rate}",
        ),
        (
            needs_fsdp and runtime.parallel != "fsdp",
            "runtime.shard_size and runtime.offload need runtime.parallel=fsdp",
        ),
        (
            moves_adapter and (algorithm.ref_sync_alpha != 1 or config.model.reference),
            "algorithm.ref_sync_steps with LoRA copies the adapter: algorithm.ref_sync_alpha must be 1, and "
            "model.reference none",
        ),
    ]


def _implied_values(config: Config) -> dict[str, Any]:
    """Values that follow from other keys, by key; a key that the user set keeps its value."""
    data = config.data
    algorithm = config.algorithm
    sets_rewards = "functions" in config.reward.model_fields_set
    found: dict[str, Any] = {}
    if config.environment:
        if "dataset" not in data.model_fields_set or data.dataset == "none":
            found["data.dataset"] = ENVIRONMENT_ROWS
        if not sets_rewards:
            found["reward.functions"] = []
    elif data.dataset.startswith("reasoning_gym:") and not sets_rewards:
        found["reward.functions"] = [schema.RewardFunction(name="reasoning_gym")]
        # The scorer gives 1 for a right answer and less for a partly right one.
        if "correct_above" not in config.eval.model_fields_set:
            found["eval.correct_above"] = 0.99

    # vLLM computes other log-probs than the trainer: truncated weights (TIS) correct them. The
    # objective dppo_tv compares with the sampler's own probabilities.
    sets_correction = "sampler_correction" in algorithm.model_fields_set
    if config.rollout.engine == "vllm" and algorithm.objective != "dppo_tv" and not sets_correction:
        found["algorithm.sampler_correction"] = "token_truncate"

    # DAPO's soft overlong punishment is a reward. The paper punishes the last 4,096 of 20,480
    # tokens.
    functions = found.get("reward.functions", config.reward.functions)
    names = [function.name for function in functions]
    length = config.rollout.max_completion_length
    if algorithm.name == "dapo" and functions and "soft_overlong" not in names and length >= 5:
        args = {"max_length": length, "cache_length": length // 5}
        punishment = schema.RewardFunction.model_construct(set(), name="soft_overlong", args=args)
        found["reward.functions"] = [*functions, punishment]
    return found


def check_world_size(config: Config, world_size: int) -> None:
    """ValueError if so many processes cannot share the problems of a step evenly; it names the
    numbers that fit."""
    prompts = config.rollout.prompts_per_step
    minibatches = config.algorithm.num_minibatches
    runtime = config.runtime
    unit = world_size * minibatches
    if prompts % unit:
        raise ValueError(
            f"rollout.prompts_per_step={prompts} is not a multiple of {world_size} processes x "
            f"algorithm.num_minibatches={minibatches}: use prompts_per_step={prompts // unit * unit + unit}"
        )
    if runtime.shard_size and world_size > 1 and world_size % runtime.shard_size:
        raise ValueError(
            f"runtime.shard_size={runtime.shard_size} does not divide {world_size} processes"
        )
    if world_size == 1 and runtime.offload != "none" and not config.debug:
        raise ValueError(f"runtime.offload={runtime.offload} needs at least 2 processes")
    if config.debug and world_size > 1:
        raise ValueError(
            f"--debug is single-process, but {world_size} processes were started: use nproc_per_node=1"
        )


DEBUG_VALUES = {
    "checkpoint.resume": "never",
    "checkpoint.save_steps": None,
    "checkpoint.keep_best": None,
    "eval.max_completion_length": None,
    "logging.wandb": "disabled",
    "logging.trackio": False,
    "logging.tensorboard": False,
}
"""Values with ``--debug``."""
DEBUG_LARGEST = {
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
"""Upper bounds of values with ``--debug``; an unset value becomes its bound."""


def debug_changes(config: Config) -> dict[str, Any]:
    """Keys that ``--debug`` sets, with their values: two small steps in one process, in
    ``<output_dir>-debug``."""
    changes = DEBUG_VALUES | {"output_dir": f"{config.output_dir.rstrip('/')}-debug"}
    for key, largest in DEBUG_LARGEST.items():
        value = attrgetter(key)(config) or largest
        changes[key] = min(value, largest)
    # One problem in each minibatch at least.
    minibatches = config.algorithm.num_minibatches
    changes["rollout.prompts_per_step"] = max(changes["rollout.prompts_per_step"], minibatches)
    return changes

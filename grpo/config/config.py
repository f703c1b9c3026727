"""The whole configuration: all sections, values that other settings imply, checks between sections, ``--debug``."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic_core import to_jsonable_python

from grpo.config import schema
from grpo.config.algorithm import AlgorithmConfig
from grpo.config.secrets import masked

ENVIRONMENT_ROWS = "environment:prompts"
"""In place of a dataset's name: the prompts are those of an environment's reset, and the rows are seeds."""


class Config(schema.Section):
    output_dir: schema.PerMachine[schema.SameResults[schema.Folder]] = "runs/default"
    """Folder of the run: config.yaml, metrics.jsonl, completions/, checkpoint-<step>/."""
    seed: int = Field(0, ge=0, lt=2**63)
    """All random numbers of the run are derived from this one."""
    model: schema.ModelConfig = schema.ModelConfig()
    lora: schema.LoraConfig = schema.LoraConfig()
    data: schema.DataConfig = schema.DataConfig()
    tools: list[schema.Tool] = []
    """Functions that the model may call (docs/tools.md): a list of {name, args}, or of names alone."""
    tools_format: Literal["auto", "tags"] = "auto"
    """Form of calls. auto: that of the tokenizer's response template; without one, that in which the chat template
    writes them, and tags. tags: the tool's only argument between <NAME> and </NAME>, or {"name": .., "arguments": {..}}
    between <tool_call> and </tool_call>."""
    environment: str | dict[str, str] | None = None
    """Class of an environment (path/to/file.py:Class), of TRL's or of reset/step form; or a mapping from names to
    classes, of which the row's column `environment` chooses."""
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
        """True with ``--debug``: one process, a few prompts, 2 steps, everything printed and checked."""
        return self._debug

    @property
    def uses_turns(self) -> bool:
        """True if completions may have several turns."""
        return bool(self.tools or self.environment or self.rollout.function)

    @property
    def uses_lora(self) -> bool:
        """True if an adapter is trained, and the model's own weights are frozen."""
        return self.lora.rank > 0 or self.model.adapter is not None

    @property
    def given(self) -> dict[str, Any]:
        """The values that the user set, nested, without those that a preset or another key implies."""
        values = self.model_dump(exclude_unset=True)
        reward = values.get("reward", {})
        if "functions" in reward:
            # A function that a preset added has no fields set, so it is empty here.
            reward["functions"] = [function for function in reward["functions"] if function]
        return values

    def for_writing(self) -> dict[str, Any]:
        """The values as they are written to files and sent to wandb: JSON types, secrets masked."""
        return masked(self.model_dump(mode="json"))

    def for_saving(self) -> dict[str, Any]:
        """:meth:`for_writing`, and :attr:`given` as the entry ``given``, from which a later run begins."""
        return self.for_writing() | {"given": masked(to_jsonable_python(self.given))}

    @model_validator(mode="wrap")
    @classmethod
    def _add_implied(cls, values: Any, read: Callable[[Any], Self]) -> Self:
        if not isinstance(values, dict):
            return read(values)
        with_environment = _add_environment(values)
        with_rewards = add_implied_rewards(with_environment)
        config = read(_add_sampler_correction(with_rewards))

        # What a preset or another key implies does not count as set by the user.
        config.model_fields_set.intersection_update(values)
        for name, given in values.items():
            if isinstance(given, dict) and isinstance(getattr(config, name), schema.Section):
                getattr(config, name).model_fields_set.intersection_update(given)
        (reward,) = _sections(values, "reward")
        if "functions" in reward:
            # A preset appends its function to those of the user.
            for function in config.reward.functions[len(reward["functions"]) :]:
                function.model_fields_set.clear()
        return config

    @model_validator(mode="after")
    def _check(self) -> Self:
        a = self.algorithm
        minibatches = a.num_minibatches
        prompts = self.rollout.prompts_per_step
        compares = a.advantages is None and (a.baseline != "none" or a.scale in ("group", "mean"))
        if self.rollout.num_generations == 1 and compares:
            remedy = "use num_generations >= 2, or algorithm.baseline=none with algorithm.scale=none"
            raise ValueError(f"rollout.num_generations=1 leaves nothing to compare with: {remedy}")
        if prompts % minibatches:
            works = _nearest_multiples(prompts, minibatches)
            mistake = f"rollout.prompts_per_step={prompts} is no multiple of algorithm.num_minibatches={minibatches}"
            raise ValueError(f"{mistake}: use prompts_per_step={works}")
        _check_lora(self)
        if not (self.reward.functions or self.environment):
            raise ValueError("reward.functions=[]: give at least 1, or an environment that gives a reward")
        if self.rollout.function and (self.tools or self.environment):
            raise ValueError("rollout.function makes whole completions: leave out tools and environment")
        runtime, reduces = self.runtime, self.optim.reduce_each_microbatch
        if runtime.parallel != "fsdp" and (runtime.shard_size or runtime.offload != "none" or reduces):
            raise ValueError("shard_size, offload and optim.reduce_each_microbatch need runtime.parallel=fsdp")
        return self


def _check_lora(config: Config) -> None:
    a, lora, adapter = config.algorithm, config.lora, config.model.adapter
    if lora.dropout > 0 and config.model.disable_dropout:
        raise ValueError("lora.dropout has no effect with model.disable_dropout=true: set disable_dropout=false")
    own = [key for key in ("rank", "alpha", "target_modules", "rslora", "init") if lora.differs_from_default(key)]
    if own and not config.uses_lora and "rank" not in lora.model_fields_set:
        raise ValueError(f"lora.{own[0]} without lora.rank would train all weights: set lora.rank (0: all weights)")
    if adapter is not None and own:
        raise ValueError(f"lora.{own[0]} and model.adapter={adapter} contradict each other: leave lora.{own[0]} out")
    if config.uses_lora and a.ref_sync_steps and config.model.reference is not None:
        raise ValueError("algorithm.ref_sync_steps moves the adapter of the reference, and model.reference has none")
    if config.uses_lora and a.ref_sync_steps and a.ref_sync_alpha != 1:
        raise ValueError("algorithm.ref_sync_alpha must be 1 with LoRA: averages of its two factors are no average")


def check_world_size(config: Config, world_size: int) -> None:
    """ValueError if so many processes cannot share the problems of a step evenly; it names the numbers that fit."""
    prompts = config.rollout.prompts_per_step
    minibatches = config.algorithm.num_minibatches
    shard_size = config.runtime.shard_size
    if prompts % (world_size * minibatches):
        factors = f"{world_size} processes" + (f" x algorithm.num_minibatches={minibatches}" if minibatches > 1 else "")
        fits = [str(n) for n in range(world_size - 1, 0, -1) if prompts % (n * minibatches) == 0]
        works = f"{' or '.join(fits)} processes, or " if fits else ""
        works += f"rollout.prompts_per_step={_nearest_multiples(prompts, world_size * minibatches)}"
        raise ValueError(f"rollout.prompts_per_step={prompts} is not a multiple of {factors}: use {works}")
    if shard_size is not None and world_size > 1 and world_size % shard_size:
        raise ValueError(f"runtime.shard_size={shard_size} does not divide {world_size} processes")
    if world_size == 1 and config.runtime.offload != "none" and not config.debug:
        raise ValueError(f"runtime.offload={config.runtime.offload} needs at least 2 processes")
    if config.debug and world_size > 1:
        raise ValueError(f"--debug is single-process, but {world_size} processes were started: use nproc_per_node=1")


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _sections(values: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Sections as a user wrote them; empty ones for values of a wrong type, which pydantic refuses."""
    return [section if isinstance(section := values.get(name), dict) else {} for name in names]


def _add_environment(values: dict[str, Any]) -> dict[str, Any]:
    """An environment brings the prompts, if there is no dataset, and the reward, if no functions are set."""
    if values.get("environment") in (None, "none"):
        return values
    data, reward = _sections(values, "data", "reward")
    if data.get("dataset") in (None, "none"):
        data = data | {"dataset": ENVIRONMENT_ROWS}
    return values | {"data": data, "reward": {"functions": []} | reward}


def add_implied_rewards(values: dict[str, Any]) -> dict[str, Any]:
    """Nested values as a user wrote them, with the reward that a dataset or a preset adds."""
    data, reward, evaluation, algorithm, rollout = _sections(values, "data", "reward", "eval", "algorithm", "rollout")
    if str(data.get("dataset", "")).startswith("reasoning_gym:") and "functions" not in reward:
        # The scorer gives 1 for a right answer and less for a partly right one.
        reward = reward | {"functions": ["reasoning_gym"]}
        values = values | dict(reward=reward, eval={"correct_above": 0.99} | evaluation)
    functions = reward.get("functions", ["accuracy"])
    length = rollout.get("max_completion_length", schema.RolloutConfig().max_completion_length)
    if algorithm.get("name") != "dapo" or not isinstance(functions, list) or not isinstance(length, int):
        return values
    # DAPO's soft overlong punishment is a reward. The paper punishes the last 4,096 of 20,480 tokens.
    names = [function.get("name") if isinstance(function, dict) else function for function in functions]
    if not functions or "soft_overlong" in names or length < 5:
        return values
    punishment = {"name": "soft_overlong", "args": {"max_length": length, "cache_length": length // 5}}
    return values | {"reward": reward | {"functions": [*functions, punishment]}}


def _add_sampler_correction(values: dict[str, Any]) -> dict[str, Any]:
    """vLLM computes other log-probs than the trainer: correct by truncated weights (TIS), unless the user decides.

    The objective dppo_tv compares with the sampler's own probabilities.
    """
    algorithm, rollout = _sections(values, "algorithm", "rollout")
    is_dppo = algorithm.get("objective", algorithm.get("name")) == "dppo_tv"
    if rollout.get("engine") != "vllm" or "sampler_correction" in algorithm or is_dppo:
        return values
    return values | {"algorithm": algorithm | {"sampler_correction": "token_truncate"}}


DEBUG_LARGEST = {
    "rollout.prompts_per_step": 2,
    "rollout.num_generations": 4,
    "rollout.max_completion_length": 64,
    "data.max_train_samples": 32,
    "data.max_eval_samples": 4,
    "optim.max_steps": 2,
    "eval.num_samples": 1,
    "eval.max_samples": 4,
    "eval.max_completion_length": 64,
    "logging.every": 1,
}
"""Upper bounds of values with ``--debug``; an unset value becomes its bound."""


def debug_changes(config: Config) -> dict[str, Any]:
    """Keys that ``--debug`` sets, with their values: two small steps in one process, in ``<output_dir>-debug``."""
    changes: dict[str, Any] = {
        "output_dir": f"{config.output_dir.rstrip('/')}-debug",
        "checkpoint.resume": "never",
        "checkpoint.save_steps": None,
        "checkpoint.keep_best": None,
        "logging.wandb": "disabled",
        "logging.trackio": False,
        "logging.tensorboard": False,
    }
    for key, largest in DEBUG_LARGEST.items():
        value = attrgetter(key)(config)
        changes[key] = largest if value is None else min(value, largest)
    if config.eval.max_completion_length is None:  # that of the rollout, whose bound counts
        del changes["eval.max_completion_length"]
    minibatches = config.algorithm.num_minibatches
    num_prompts = changes["rollout.prompts_per_step"]
    changes["rollout.prompts_per_step"] = max(num_prompts // minibatches, 1) * minibatches
    return changes

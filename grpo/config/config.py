"""The whole configuration: all sections, values that other settings imply, checks of settings that contradict each other, ``--debug``."""

from typing import Any, Self

from pydantic import Field, model_validator

from grpo.config import schema
from grpo.config.algorithm import AlgorithmConfig
from grpo.config.evaluation import EvalConfig
from grpo.config.logging import LoggingConfig
from grpo.config.lora import LoraConfig
from grpo.config.rollout import RolloutConfig
from grpo.config.secrets import masked


class Config(schema.Section):
    output_dir: schema.Folder = "runs/default"
    """Folder of the run: config.yaml, metrics.jsonl, completions/, checkpoint-<step>/."""
    seed: int = Field(0, ge=0, lt=2**63)
    """All random numbers of the run are derived from this one."""
    debug: bool = False
    """The same as --debug: one process, a few prompts, 2 steps, everything printed and checked."""
    model: schema.ModelConfig = schema.ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: schema.DataConfig = schema.DataConfig()
    reward: schema.RewardConfig = schema.RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: schema.OptimConfig = schema.OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: schema.CheckpointConfig = schema.CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    runtime: schema.RuntimeConfig = schema.RuntimeConfig()

    @property
    def uses_lora(self) -> bool:
        """True if an adapter is trained, and the model's own weights are frozen."""
        return self.lora.rank > 0 or self.model.adapter is not None

    def for_writing(self) -> dict[str, Any]:
        """The values as they are written to files and sent to wandb: JSON types, secrets masked."""
        return masked(self.model_dump(mode="json"))

    @model_validator(mode="before")
    @classmethod
    def _add_implied(cls, values: Any) -> Any:
        return _add_sampler_correction(add_implied_rewards(values)) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        a, r, minibatches = self.algorithm, self.rollout, self.algorithm.num_minibatches
        key = "prompts_per_step" if r.prompts_per_rank is None else "prompts_per_rank"
        prompts = getattr(r, key)
        if r.num_generations == 1 and (a.baseline != "none" or a.scale in ("group", "mean")):
            raise ValueError(
                f"rollout.num_generations=1 leaves nothing to compare with under algorithm.baseline={a.baseline}, "
                f"algorithm.scale={a.scale}: use num_generations >= 2, or baseline=none with scale=none"
            )
        if prompts % minibatches:
            raise ValueError(
                f"rollout.{key}={prompts} cannot be cut into algorithm.num_minibatches={minibatches} equal parts: "
                f"use {key}={_nearest_multiples(prompts, minibatches)}"
            )
        _check_lora(self)
        _check_fsdp(self)
        _check_maxrl(self)
        return self


def _check_lora(config: Config) -> None:
    a, model = config.algorithm, config.model
    if config.lora.dropout > 0 and model.disable_dropout:
        raise ValueError(
            f"lora.dropout={config.lora.dropout:g} has no effect with model.disable_dropout=true: set lora.dropout=0, or disable_dropout=false"
        )
    # By value: a configuration that a run has written sets every key.
    own, defaults = config.lora.model_dump(exclude={"dropout", "base_precision"}), LoraConfig().model_dump()
    contradictory = sorted(name for name, value in own.items() if value != defaults[name])
    if model.adapter is not None and contradictory:
        raise ValueError(
            f"lora.{contradictory[0]} and model.adapter={model.adapter} contradict each other: the adapter has its own rank, alpha and "
            f"layers, so leave lora.{contradictory[0]} out"
        )
    if config.checkpoint.merge and not config.uses_lora:
        raise ValueError("checkpoint.merge=true needs LoRA (lora.rank): without it every checkpoint is a whole model")
    if config.uses_lora and a.ref_sync_steps and model.reference is not None:
        raise ValueError(
            "algorithm.ref_sync_steps with LoRA moves the adapter of the reference, and model.reference has none: leave one of the two out"
        )
    if config.uses_lora and a.ref_sync_steps and a.ref_sync_alpha != 1:
        raise ValueError(
            f"algorithm.ref_sync_alpha={a.ref_sync_alpha:g} would average weights, and LoRA trains two factors of them, whose averages "
            "are not the average: use ref_sync_alpha=1"
        )


def _check_fsdp(config: Config) -> None:
    runtime = config.runtime
    if runtime.parallel == "fsdp":
        if config.checkpoint.background:
            raise ValueError(
                "checkpoint.background=true copies the whole state to rank 0, which no rank holds under runtime.parallel=fsdp: use "
                "background=false"
            )
        return
    for key, value in (("runtime.shard_size", runtime.shard_size), ("runtime.offload", runtime.offload)):
        if value not in (None, "none"):
            raise ValueError(f"{key}={value} needs runtime.parallel=fsdp, and it is ddp")
    if config.optim.reduce_each_microbatch:
        raise ValueError("optim.reduce_each_microbatch=true needs runtime.parallel=fsdp, and it is ddp")


def _check_maxrl(config: Config) -> None:
    """MaxRL divides by a mean of rewards. Of the built-in ones only this one is below 0; the rewards of each step are checked too."""
    lowers = any(function.name == "soft_overlong" and function.weight > 0 for function in config.reward.functions)
    if config.algorithm.scale == "mean" and lowers:
        raise ValueError(
            "algorithm.scale=mean (MaxRL) divides by the mean reward of a group, so rewards must not be negative, and reward soft_overlong "
            "is between -1 and 0: leave it out, or take algorithm.scale=group"
        )


def check_world_size(config: Config, world_size: int, *, num_machines: int = 1) -> None:
    """Raise ``ValueError`` for a number of ranks that cannot share the problems of a step evenly; the message names what would work."""
    if not shares_evenly(config, world_size):
        prompts, minibatches = config.rollout.prompts_per_step, config.algorithm.num_minibatches
        factors = f"{world_size} ranks" + (f" x algorithm.num_minibatches={minibatches}" if minibatches > 1 else "")
        works = f"rollout.prompts_per_step={_nearest_multiples(prompts, world_size * minibatches)}"
        fewer = range(world_size // num_machines - 1, 0, -1)  # ranks of each machine
        if fits := [str(ranks) for ranks in fewer if shares_evenly(config, ranks * num_machines)]:
            others = f" (or {', '.join(fits[1:])})" if fits[1:] else ""
            works = f"--nproc_per_node={fits[0]}{others}, or {works}"
        raise ValueError(f"rollout.prompts_per_step={prompts} is not a multiple of {factors}: use {works}")
    shard_size = config.runtime.shard_size
    if shard_size is not None and world_size > 1 and world_size % shard_size:
        divisors = [str(size) for size in range(2, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"runtime.shard_size={shard_size} does not divide {world_size} ranks: use {' or '.join(divisors)}, or null for all"
        )
    if world_size == 1 and config.runtime.offload != "none" and not config.debug:
        raise ValueError(
            f"runtime.offload={config.runtime.offload} needs at least 2 ranks: one rank trains as under ddp, with offload=none"
        )
    if config.debug and world_size > 1:
        raise ValueError(f"--debug is single-process, but {world_size} processes were started: use nproc_per_node=1")


def shares_evenly(config: Config, world_size: int) -> bool:
    """True if every minibatch of a step has the same number of problems on each rank."""
    return config.rollout.prompts_per_step % (world_size * config.algorithm.num_minibatches) == 0


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def add_implied_rewards(values: dict[str, Any]) -> dict[str, Any]:
    """Nested values as a user wrote them, with the reward that a dataset or a preset adds. Values of a wrong type stay as they are."""
    return _add_overlong_punishment(_add_gym_scorer(values))


def _add_gym_scorer(values: dict[str, Any]) -> dict[str, Any]:
    """Add the scorer of a reasoning-gym task as the reward, unless the user names rewards."""
    data, reward, evaluation = sections = [values.get(name, {}) for name in ("data", "reward", "eval")]
    if not all(isinstance(section, dict) for section in sections):
        return values
    if not str(data.get("dataset", "")).startswith("reasoning_gym:") or "functions" in reward:
        return values
    # The scorer gives 1 for a right answer and less for a partly right one.
    return values | dict(reward=reward | {"functions": ["reasoning_gym"]}, eval={"correct_above": 0.99} | evaluation)


def _add_overlong_punishment(values: dict[str, Any]) -> dict[str, Any]:
    """DAPO's soft overlong punishment is a reward; the preset ``dapo`` adds it, unless it is already written."""
    algorithm, reward, rollout = sections = [values.get(name, {}) for name in ("algorithm", "reward", "rollout")]
    if not all(isinstance(section, dict) for section in sections):
        return values
    functions = reward.get("functions", [function.model_dump() for function in schema.RewardConfig().functions])
    length = rollout.get("max_completion_length", RolloutConfig().max_completion_length)
    if algorithm.get("name") != "dapo" or not isinstance(functions, list) or not isinstance(length, int):
        return values
    names = [function.get("name") if isinstance(function, dict) else function for function in functions]
    cache_length = length // 5  # the paper punishes the last 4,096 of 20,480 tokens
    if not functions or "soft_overlong" in names or cache_length < 1:
        return values
    punishment = {"name": "soft_overlong", "args": {"max_length": length, "cache_length": cache_length}}
    return values | {"reward": reward | {"functions": [*functions, punishment]}}


def _add_sampler_correction(values: dict[str, Any]) -> dict[str, Any]:
    """vLLM computes other log-probs than the trainer: correct by truncated weights (TIS), unless the user or the objective decides."""
    algorithm, rollout = sections = [values.get(name, {}) for name in ("algorithm", "rollout")]
    if not all(isinstance(section, dict) for section in sections) or rollout.get("engine") != "vllm":
        return values
    # dppo_tv compares with the sampler's own probabilities.
    if "sampler_correction" in algorithm or algorithm.get("objective", algorithm.get("name")) == "dppo_tv":
        return values
    return values | {"algorithm": algorithm | {"sampler_correction": "token_truncate"}}


DEBUG_LARGEST: dict[str, dict[str, int]] = {
    "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 64},
    "data": {"max_train_samples": 32, "max_eval_samples": 4},
    "optim": {"max_steps": 2},
    "eval": {"num_samples": 1, "max_samples": 4, "max_completion_length": 64},
    "logging": {"every": 1},
}
"""Upper bounds of values with ``--debug``; an unset value becomes its bound."""


def debug_variant(config: Config) -> Config:
    """The configuration of ``--debug``: two small steps in one process, in a folder of its own, ``<output_dir>-debug``."""
    values = config.model_dump()
    for section, keys in DEBUG_LARGEST.items():
        for key, largest in keys.items():
            value = values[section][key]
            values[section][key] = largest if value is None else min(value, largest)
    if config.eval.max_completion_length is None:  # that of the rollout, whose bound counts
        values["eval"]["max_completion_length"] = None
    values["checkpoint"] |= {"resume": "never", "save_steps": None, "keep_best": None}
    values["logging"] |= {"wandb": "disabled", "tensorboard": False}
    minibatches = config.algorithm.num_minibatches
    values["rollout"]["prompts_per_step"] = max(values["rollout"]["prompts_per_step"] // minibatches, 1) * minibatches
    folder = config.output_dir.rstrip("/")
    if not (config.debug and folder.endswith("-debug")):  # that is the configuration of a debug run, read again
        folder = f"{folder}-debug"
    return Config.model_validate(values | {"debug": True, "output_dir": folder})

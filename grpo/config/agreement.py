"""What sections of a configuration imply for one another, and where they contradict: read before and after they are validated."""

from __future__ import annotations

from typing import Any


def add_what_is_implied(values: dict[str, Any]) -> dict[str, Any]:
    """Nested values as a person wrote them, with the rewards that a preset or a dataset brings along."""
    return _dapo_punishes_overlong(_gym_brings_its_scorer(values))


def _dapo_punishes_overlong(values: dict[str, Any]) -> dict[str, Any]:
    """DAPO's soft overlong punishment is a reward; the preset adds it unless the config already names it."""
    if not isinstance(values.get("algorithm"), dict):
        return values
    reward = values.get("reward", {})
    functions = reward.get("functions", ["accuracy"]) if isinstance(reward, dict) else None
    if values["algorithm"].get("name") != "dapo" or not isinstance(functions, list) or not functions:
        return values
    names = [item.get("name") if isinstance(item, dict) else item for item in functions]
    if "soft_overlong" in names:
        return values
    rollout = values.get("rollout", {})
    length = rollout.get("max_completion_length", 256) if isinstance(rollout, dict) else None
    if not isinstance(length, int) or length < 5:
        return values
    # The paper punishes over the last 4,096 of 20,480 tokens: a fifth.
    punishment = {"name": "soft_overlong", "args": {"max_length": length, "cache_length": length // 5}}
    return values | {"reward": reward | {"functions": [*functions, punishment]}}


def _gym_brings_its_scorer(values: dict[str, Any]) -> dict[str, Any]:
    """A reasoning-gym task is scored by its own scorer, unless the config says otherwise; 1 is right, less is partly so."""
    data = values.get("data")
    if not isinstance(data, dict) or not str(data.get("dataset", "")).startswith("reasoning_gym:"):
        return values
    reward, evaluation = values.get("reward") or {}, values.get("eval") or {}
    if not isinstance(reward, dict) or not isinstance(evaluation, dict) or "functions" in reward:
        return values
    return values | {
        "reward": reward | {"functions": ["reasoning_gym"]},
        "eval": {"correct_above": 0.99} | evaluation,
    }


def check_sections_agree(config) -> None:
    """Refuse settings of a ``Config`` that contradict one another.

    Raises:
        ValueError: naming both, and what would work.
    """
    a, G = config.algorithm, config.rollout.num_generations
    if G == 1 and (a.baseline != "none" or a.scale == "group"):
        raise ValueError(
            f"rollout.num_generations=1 leaves nothing to compare with under algorithm.baseline={a.baseline}, "
            f"algorithm.scale={a.scale}: use num_generations >= 2, or baseline=none with scale=none"
        )
    if a.objective == "reinforce" and a.updates_per_step > 1:
        raise ValueError(
            f"algorithm.objective=reinforce takes one update per rollout, got num_iterations={a.num_iterations} x "
            f"num_minibatches={a.num_minibatches}: later updates would be off-policy and it has no importance ratio; "
            "use objective=clip, or 1 and 1"
        )
    if a.delta is not None and a.delta <= 1 + a.clip_high:
        raise ValueError(f"algorithm.delta={a.delta} must be above 1 + epsilon_high = {1 + a.clip_high:g}")
    if config.rollout.prompts_per_step % a.num_minibatches:
        works = _nearest_multiples(config.rollout.prompts_per_step, a.num_minibatches)
        raise ValueError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} cannot be cut into "
            f"algorithm.num_minibatches={a.num_minibatches} equal parts: use prompts_per_step={works}"
        )
    if config.eval.num_samples > 1 and config.eval.temperature == 0:
        raise ValueError(
            f"eval.num_samples={config.eval.num_samples} at eval.temperature=0 would be the same completion "
            f"{config.eval.num_samples} times: set eval.temperature (1.0, say), or num_samples=1 for greedy only"
        )
    if config.optim.min_lr is not None and config.optim.lr_scheduler_type not in ("cosine", "cosine_with_min_lr"):
        raise ValueError(
            f"optim.min_lr needs lr_scheduler_type=cosine, got lr_scheduler_type={config.optim.lr_scheduler_type}"
        )
    if config.optim.min_lr is None and config.optim.lr_scheduler_type == "cosine_with_min_lr":
        raise ValueError(f"optim.lr_scheduler_type={config.optim.lr_scheduler_type} needs optim.min_lr")
    if config.optim.min_lr is not None and config.optim.min_lr > config.optim.learning_rate:
        raise ValueError(
            f"optim.min_lr={config.optim.min_lr:g} is above optim.learning_rate={config.optim.learning_rate:g}, from where it comes down"
        )
    for example in config.data.few_shot:
        if set(example) != {"prompt", "completion"}:
            raise ValueError(f"data.few_shot takes {{prompt, completion}} entries, got keys {sorted(example)}")


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def check_world_size(config, world_size: int) -> None:
    """Refuse a number of ranks that cannot share the step evenly.

    Raises:
        ValueError: naming the nearest values of ``rollout.prompts_per_step`` that work.
    """
    unit = world_size * config.algorithm.num_minibatches
    P = config.rollout.prompts_per_step
    if P % unit:
        minibatches = f" x algorithm.num_minibatches={config.algorithm.num_minibatches}" * (unit > world_size)
        raise ValueError(
            f"rollout.prompts_per_step={P} is not a multiple of {world_size} ranks{minibatches}: "
            f"use prompts_per_step={_nearest_multiples(P, unit)}"
        )
    if config.debug and world_size > 1:
        raise ValueError(f"--debug is single-process, but {world_size} processes were started: use nproc_per_node=1")

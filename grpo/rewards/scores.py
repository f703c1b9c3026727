"""Score sampled groups. This module imports torch, which reward workers do not need: they do not import it."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

from grpo.algorithm.batch import Completion, Group, Problem, Turns
from grpo.config import Config
from grpo.rewards.runner import RewardResult, RewardRunner
from grpo.rewards.worker import OUTSIDE_TRAINING, TrainerState


def score_groups(
    rewards: RewardRunner, groups: Sequence[Group], trainer_state: TrainerState = OUTSIDE_TRAINING
) -> RewardResult:
    """Score every completion of some groups. As in TRL, completions of conversational prompts are lists of messages."""
    all_rows = [(group.problem, completion) for group in groups for completion in group.completions]
    is_scored = [not isinstance(c, Turns) or c.stop_reason != "failed" for _, c in all_rows]
    rows = list(compress(all_rows, is_scored))
    prompts = [problem.prompt if problem.reward_prompt is None else problem.reward_prompt for problem, _ in rows]
    columns = [problem.columns | (c.fields if isinstance(c, Turns) else {}) for problem, c in rows]
    values = {name: [row.get(name) for row in columns] for name in dict.fromkeys(n for row in columns for n in row)}
    if any(isinstance(completion, Turns) and completion.environment_name for _, completion in rows):
        for argument in ("environment", "environment_name", "environment_reward"):
            values[f"{argument}s"] = [getattr(completion, argument) for _, completion in rows]
    result = rewards.score(
        prompts=prompts,
        completions=[_as_rewards_get_it(prompt, c) for prompt, (_, c) in zip(prompts, rows, strict=True)],
        columns=values,
        completion_ids=[list(completion.sampled_ids) for _, completion in rows],
        trainer_state=trainer_state,
    )
    result = result if all(is_scored) else result.spread(is_scored)
    result.num_failed_environments = len(all_rows) - len(rows)
    return result


def _as_rewards_get_it(prompt: Any, completion: Completion) -> Any:
    if isinstance(prompt, str):  # of several turns the last
        return completion.text
    turns = completion.messages if isinstance(completion, Turns) else ()
    return [dict(m) for m in turns] or [{"role": "assistant", "content": completion.text}]


def messages_warning(config: Config, problems: Sequence[Problem]) -> str | None:
    """A note if ``data.conversational=auto`` made messages of text rows, and rewards of the user's own get them."""
    own = [function.name for function in config.reward.functions if ":" in function.name]
    is_changed = any(isinstance(p.prompt, str) and isinstance(p.reward_prompt, list) for p in problems)
    if config.data.conversational != "auto" or not is_changed or not own or config.uses_turns:
        return None
    why = "since data.system_prompt or data.few_shot is set: data.conversational=false gives them as text"
    return f"note: for {', '.join(own)} completions are lists of messages, {why}, true ends this note"

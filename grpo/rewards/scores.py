"""Score sampled groups. This module imports torch, which reward workers do not need: they do not import it."""

from collections.abc import Sequence
from typing import Any

from grpo.algorithm.batch import Completion, Group, Problem, Turns
from grpo.config import Config
from grpo.rewards.calls import OUTSIDE_TRAINING, TrainerState
from grpo.rewards.runner import RewardResult, RewardRunner


def score_groups(
    rewards: RewardRunner,
    groups: Sequence[Group],
    trainer_state: TrainerState = OUTSIDE_TRAINING,
) -> RewardResult:
    """Score every completion of some groups, but for those whose environment has failed."""
    prompts = []
    completions = []
    is_scored = []
    records = []
    for group in groups:
        problem = group.problem
        prompt = problem.prompt if problem.reward_prompt is None else problem.reward_prompt
        for completion in group.completions:
            record = dict(problem.columns)
            is_failed = False
            if isinstance(completion, Turns):
                record |= completion.fields
                is_failed = completion.stop_reason == "failed"
                if completion.environment_name:
                    record |= {
                        "environments": completion.environment,
                        "environment_names": completion.environment_name,
                        "environment_rewards": completion.environment_reward,
                    }
            prompts.append(prompt)
            completions.append(_as_rewards_get_it(prompt, completion))
            is_scored.append(not is_failed)
            records.append(record)

    names = dict.fromkeys(name for record in records for name in record)
    result = rewards.score(
        prompts=prompts,
        completions=completions,
        columns={name: [record.get(name) for record in records] for name in names},
        completion_ids=[list(c.sampled_ids) for group in groups for c in group.completions],
        trainer_state=trainer_state,
        is_scored=is_scored,
    )
    result.num_failed_environments = is_scored.count(False)
    return result


def _as_rewards_get_it(prompt: Any, completion: Completion) -> Any:
    """As in TRL, completions of conversational prompts are lists of messages, others text."""
    if isinstance(prompt, str):  # of several turns the last
        return completion.text
    if isinstance(completion, Turns) and completion.messages:
        return [dict(message) for message in completion.messages]
    return [{"role": "assistant", "content": completion.text}]


def messages_warning(config: Config, problems: Sequence[Problem]) -> str | None:
    """A note if ``data.conversational=auto`` made messages of text rows, and rewards of the user's own get them."""
    own = [function.name for function in config.reward.functions if ":" in function.name]
    is_changed = any(isinstance(p.prompt, str) and isinstance(p.reward_prompt, list) for p in problems)
    if config.data.conversational != "auto" or not is_changed or not own or config.uses_turns:
        return None
    why = "since data.system_prompt or data.few_shot is set: data.conversational=false gives them as text"
    return f"note: for {', '.join(own)} completions are lists of messages, {why}, true ends this note"

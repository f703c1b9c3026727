"""Score sampled groups. This module imports torch, which reward workers do not need: they do not
import it.
"""

from collections.abc import Sequence
from typing import Any

from grpo.algorithm.batch import Completion, Group, MultiTurnCompletion
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
    completion_ids = []
    is_scored = []
    environment_failures = []
    records = []
    for group in groups:
        problem = group.problem
        prompt = problem.prompt_for_rewards
        for completion in group.completions:
            prompts.append(prompt)
            completions.append(_as_rewards_get_it(prompt, completion))
            completion_ids.append(list(completion.sampled_ids))
            failure = None
            record = dict(problem.columns)
            if isinstance(completion, MultiTurnCompletion) and completion.environment is not None:
                failure = completion.environment_failure
                record["environments"] = completion.environment
                record["environment_rewards"] = completion.environment_reward
            if failure is not None:
                environment_failures.append(failure)
            is_scored.append(not failure)
            records.append(record)

    columns = {}
    for name in dict.fromkeys(name for record in records for name in record):
        columns[name] = [record.get(name) for record in records]
    result = rewards.score(
        prompts=prompts,
        completions=completions,
        columns=columns,
        completion_ids=completion_ids,
        trainer_state=trainer_state,
        is_scored=is_scored,
    )
    result.environment_failures = environment_failures
    return result


def _as_rewards_get_it(prompt: Any, completion: Completion) -> Any:
    """As in TRL, completions of conversational prompts are lists of messages, others text."""
    # The text of a conversation is that of its last turn.
    if isinstance(prompt, str):
        return completion.text
    if isinstance(completion, MultiTurnCompletion) and completion.messages:
        return [dict(message) for message in completion.messages]
    return [{"role": "assistant", "content": completion.text}]

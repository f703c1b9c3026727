"""Score the sampled groups of the trainer with its reward functions.

This module imports torch, so modules that run in worker processes must not import this module.
"""

from collections.abc import Sequence
from typing import Any

from grpo.algorithm.batch import Completion, Group
from grpo.rewards.calls import OUTSIDE_TRAINING, TrainerState
from grpo.rewards.runner import RewardResult, RewardRunner


def score_groups(
    rewards: RewardRunner,
    groups: Sequence[Group],
    trainer_state: TrainerState = OUTSIDE_TRAINING,
) -> RewardResult:
    """Score all completions of some groups, except completions whose environment has failed."""
    prompts = []
    completions = []
    completion_ids = []
    is_scored = []
    environment_failures = []
    columns_of_rows = []
    for group in groups:
        problem = group.problem
        prompt = problem.reward_prompt or problem.prompt
        for completion in group.completions:
            prompts.append(prompt)
            completions.append(answer_to(prompt, completion))
            completion_ids.append(list(completion.sampled_ids))
            failure = None
            row_columns = dict(problem.columns)
            if completion.environment is not None:
                failure = completion.environment_failure
                row_columns["environments"] = completion.environment
                row_columns["environment_rewards"] = completion.environment_reward
            # Empty text means a working environment. None means no environment, or no action.
            if failure is not None:
                environment_failures.append(failure)
            is_scored.append(not failure)
            columns_of_rows.append(row_columns)

    # Rewards get one list per column. A row may lack a column that another row has.
    names = dict.fromkeys(name for row_columns in columns_of_rows for name in row_columns)
    columns = {name: [row_columns.get(name) for row_columns in columns_of_rows] for name in names}
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


def answer_to(prompt: Any, completion: Completion) -> Any:
    """Return a completion in the form of its prompt, as TRL does: text, or a list of messages."""
    # The text of a conversation is the text of its last turn.
    if isinstance(prompt, str):
        return completion.text
    if completion.messages:
        return list(completion.messages)
    return [{"role": "assistant", "content": completion.text}]

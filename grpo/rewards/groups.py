"""Score sampled groups. ``grpo.rewards`` does not import this module: ``grpo.batch`` imports torch, which reward workers do not need."""

from collections.abc import Sequence

from grpo.batch import Group
from grpo.rewards.result import RewardResult
from grpo.rewards.runner import RewardRunner


def score_groups(rewards: RewardRunner, groups: Sequence[Group]) -> RewardResult:
    """Score every completion of some groups. As in TRL, completions of conversational prompts are passed as lists of messages."""
    rows = [(group.problem, completion) for group in groups for completion in group.completions]
    column_names = dict.fromkeys(name for problem, _ in rows for name in problem.columns)
    return rewards.score(
        prompts=[problem.prompt for problem, _ in rows],
        completions=[
            completion.text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": completion.text}]
            for problem, completion in rows
        ],
        columns={name: [problem.columns.get(name) for problem, _ in rows] for name in column_names},
        completion_ids=[list(completion.ids) for _, completion in rows],
    )

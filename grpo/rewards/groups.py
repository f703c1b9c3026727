"""From sampled groups to the arguments of reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # workers import this package, and need no torch
    from grpo.batch import Group
    from grpo.rewards.result import RewardResult
    from grpo.rewards.runner import RewardRunner


def score_groups(rewards: RewardRunner, groups: Sequence[Group]) -> RewardResult:
    """Hand the completions of some groups to the reward functions, TRL's way: conversational prompts get messages."""
    pairs = [(group.problem, completion) for group in groups for completion in group.completions]
    names = dict.fromkeys(name for problem, _ in pairs for name in problem.columns)
    return rewards.score(
        prompts=[problem.prompt for problem, _ in pairs],
        completions=[
            c.text if isinstance(p.prompt, str) else [{"role": "assistant", "content": c.text}] for p, c in pairs
        ],
        columns={name: [problem.columns.get(name) for problem, _ in pairs] for name in names},
        completion_ids=[list(completion.ids) for _, completion in pairs],
    )

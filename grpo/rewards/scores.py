"""Score sampled groups. This module imports torch, which reward workers do not need: they do not import it."""

from collections.abc import Sequence

from grpo.algorithm.batch import Group, Problem
from grpo.config import Config
from grpo.rewards.runner import RewardResult, RewardRunner
from grpo.rewards.worker import OUTSIDE_TRAINING, TrainerState


def score_groups(
    rewards: RewardRunner, groups: Sequence[Group], trainer_state: TrainerState = OUTSIDE_TRAINING
) -> RewardResult:
    """Score every completion of some groups. As in TRL, completions of conversational prompts are lists of messages."""
    rows = [(group.problem, completion) for group in groups for completion in group.completions]
    prompts = [problem.prompt if problem.reward_prompt is None else problem.reward_prompt for problem, _ in rows]
    column_names = dict.fromkeys(name for problem, _ in rows for name in problem.columns)
    return rewards.score(
        prompts=prompts,
        completions=[
            completion.text if isinstance(prompt, str) else [{"role": "assistant", "content": completion.text}]
            for prompt, (_, completion) in zip(prompts, rows, strict=True)
        ],
        columns={name: [problem.columns.get(name) for problem, _ in rows] for name in column_names},
        completion_ids=[list(completion.ids) for _, completion in rows],
        trainer_state=trainer_state,
    )


def messages_warning(config: Config, problems: Sequence[Problem]) -> str | None:
    """A note if ``data.conversational=auto`` made messages of text rows, and rewards of the user's own get them."""
    own = [function.name for function in config.reward.functions if ":" in function.name]
    is_changed = any(isinstance(p.prompt, str) and isinstance(p.reward_prompt, list) for p in problems)
    if config.data.conversational != "auto" or not is_changed or not own:
        return None
    why = "since data.system_prompt or data.few_shot is set: data.conversational=false gives them as text"
    return f"note: for {', '.join(own)} completions are lists of messages, {why}, true ends this note"

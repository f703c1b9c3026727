"""Grade completions with the rewards of a run: is a completion correct, well-formed, correct by its last number, truncated."""

from collections.abc import Sequence

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.config import EvalConfig
from grpo.evaluation.estimate import CompletionResult
from grpo.rewards import RewardRunner
from grpo.rewards.answers import answers_equal, extract_answer, has_format
from grpo.rewards.scores import score_groups
from grpo.rewards.worker import OUTSIDE_TRAINING, TrainerState

ANSWER_CHECKERS = (
    "accuracy", "math_verify", "countdown", "r1_zero", "pattern_answer", "exact_or_stripped", "python_tests", "reasoning_gym",
)  # fmt: skip
"""The built-in rewards that check an answer."""


class Grader:
    """``grade(groups)``: the results of each group's completions, from the rewards of the run.

    Args:
        config: ``correctness`` names the reward that decides what is correct (a value above ``correct_above``), by default the first
            one that checks answers. ``format`` names the reward that decides what is well-formed (a value above 0), by default the
            reward ``format``. Without that reward, a response is well-formed if it has an answer in the place where ``accuracy``
            looks for it (modes ``boxed`` and ``####``), else if it is ``<think>..</think> <answer>..</answer>``.
        rewards: scores the completions. What they give to ``log_metric`` and ``log_extra`` is dropped: it belongs to training.
    """

    def __init__(self, config: EvalConfig, rewards: RewardRunner, trainer_state: TrainerState = OUTSIDE_TRAINING):
        names = rewards.names
        self.rewards = rewards
        self.correctness = config.correctness or next(filter(_checks_answers, names), names[0])
        self.correct_above = config.correct_above
        self.format = config.format or ("format" if "format" in names else None)
        self.mode = _answer_mode(rewards, self.correctness)
        self.trainer_state = trainer_state

    def __call__(self, groups: Sequence[Group]) -> list[list[CompletionResult]]:
        rows = iter(score_groups(self.rewards, groups, self.trainer_state).values)
        return [
            [self._grade(group.problem, completion, next(rows)) for completion in group.completions] for group in groups
        ]

    def _grade(self, problem: Problem, completion: Completion, row: list[float | None]) -> CompletionResult:
        rewards = dict(zip(self.rewards.names, row, strict=True))
        correctness = rewards[self.correctness]
        answer = problem.columns.get("answer")
        last_number = extract_answer(completion.text, mode="lenient")
        return CompletionResult(
            correct=correctness is not None and correctness > self.correct_above,
            formatted=(rewards[self.format] or 0.0) > 0 if self.format else self._is_well_formed(completion.text),
            lenient=answer is not None and last_number is not None and answers_equal(last_number, str(answer)),
            length=len(completion.ids),
            truncated=not completion.finished,
            rewards=rewards,
            scored=correctness is not None,
            text=completion.text,
        )

    def _is_well_formed(self, text: str) -> bool:
        return has_format(text) if self.mode is None else extract_answer(text, self.mode) is not None


def _answer_mode(rewards: RewardRunner, correctness: str) -> str | None:
    """The mode of ``accuracy`` if that decides what is correct, in a mode with a form of its own: ``boxed`` or ``####``."""
    spec = rewards.specs[rewards.names.index(correctness)]
    mode = spec.args.get("mode") if spec.name == "accuracy" else None
    return mode if mode in ("boxed", "####") else None


def _checks_answers(reward: str) -> bool:
    return reward in ANSWER_CHECKERS


def correctness_note(config: EvalConfig, names: Sequence[str]) -> str | None:
    """A note on the reward that decides what is correct; None if the configuration names it or a reward is known to check answers."""
    if config.correctness or any(map(_checks_answers, names)):
        return None
    rule = f"evaluations count a completion as correct if {names[0]} > {config.correct_above:g}"
    return f"note: no reward is known to check answers, so {rule}; eval.correctness=REWARD chooses another"


def check_reward_names(config: EvalConfig, names: Sequence[str]) -> None:
    """Raise ``ValueError``, with a list of the rewards, unless ``eval.correctness`` and ``eval.format`` are among them."""
    for key, name in (("correctness", config.correctness), ("format", config.format)):
        if name is not None and name not in names:
            raise ValueError(f"eval.{key}={name}: no such reward; there are {', '.join(names)}")

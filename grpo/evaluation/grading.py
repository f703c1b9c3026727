"""Grade completions with the rewards of a run: is a completion correct, well-formed, correct by its last number."""

from collections.abc import Sequence

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.config import EvalConfig
from grpo.evaluation.estimate import CompletionResult
from grpo.rewards import RewardRunner
from grpo.rewards.answers import answers_equal, extract_answer, has_format
from grpo.rewards.scores import score_groups
from grpo.rewards.worker import OUTSIDE_TRAINING, TrainerState

ANSWER_CHECKERS = (
    "accuracy", "math_verify", "countdown", "r1_zero", "pattern_answer", "exact_or_stripped", "python_tests",
    "reasoning_gym",
)  # fmt: skip
"""The built-in rewards that check an answer."""


class Grader:
    """``grade(groups)``: the results of each group's completions, from the rewards of the run.

    Correct: the reward ``eval.correctness`` (by default the first that checks answers) is above ``correct_above``.
    Well-formed: the reward ``eval.format`` (by default ``format``) is above 0. Without it, a response is well-formed if
    it has an answer where ``accuracy`` looks for one (modes ``boxed``, ``####``), else if it has think and answer tags.
    """

    def __init__(self, config: EvalConfig, rewards: RewardRunner, trainer_state: TrainerState = OUTSIDE_TRAINING):
        names = rewards.names
        self.rewards, self.trainer_state, self.correct_above = rewards, trainer_state, config.correct_above
        self.correctness = config.correctness or next(filter(ANSWER_CHECKERS.__contains__, names), names[0])
        self.format = config.format or ("format" if "format" in names else None)
        spec = rewards.specs[names.index(self.correctness)]
        self.mode = spec.args.get("mode") if spec.name == "accuracy" else None

    def __call__(self, groups: Sequence[Group]) -> list[list[CompletionResult]]:
        rows = iter(score_groups(self.rewards, groups, self.trainer_state).values)
        return [[self._grade(group.problem, c, next(rows)) for c in group.completions] for group in groups]

    def _grade(self, problem: Problem, completion: Completion, row: list[float | None]) -> CompletionResult:
        rewards = dict(zip(self.rewards.names, row, strict=True))
        correctness, answer = rewards[self.correctness], problem.columns.get("answer")
        last_number = extract_answer(completion.text, mode="lenient")
        return CompletionResult(
            correct=correctness is not None and correctness > self.correct_above,
            formatted=(rewards[self.format] or 0.0) > 0 if self.format else self._is_well_formed(completion.text),
            lenient=answer is not None and last_number is not None and answers_equal(last_number, str(answer)),
            length=len(completion.sampled_ids),
            truncated=not completion.finished,
            rewards=rewards,
            scored=correctness is not None,
            text=completion.transcript,
        )

    def _is_well_formed(self, text: str) -> bool:
        return extract_answer(text, self.mode) is not None if self.mode in ("boxed", "####") else has_format(text)


def correctness_note(config: EvalConfig, names: Sequence[str]) -> str | None:
    """A note on the reward that decides what is correct, if nothing says that it checks answers."""
    if config.correctness or set(names) & set(ANSWER_CHECKERS):
        return None
    rule = f"evaluations count a completion as correct if {names[0]} > {config.correct_above:g}"
    return f"note: no reward is known to check answers, so {rule}; eval.correctness=REWARD chooses another"


def check_reward_names(config: EvalConfig, names: Sequence[str]) -> None:
    """``ValueError`` unless ``eval.correctness`` and ``eval.format`` are among the rewards."""
    for key, name in (("correctness", config.correctness), ("format", config.format)):
        if name is not None and name not in names:
            raise ValueError(f"eval.{key}={name}: no such reward; there are {', '.join(names)}")

"""Grade completions with the rewards of a run: is a completion correct, well-formed, correct by its
last number."""

from collections.abc import Sequence

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.config import EvalConfig
from grpo.evaluation.estimate import CompletionResult
from grpo.rewards import RewardRunner
from grpo.rewards.answers import equals_reference, extract_answer, has_format
from grpo.rewards.builtin import COMPARING
from grpo.rewards.calls import OUTSIDE_TRAINING, TrainerState
from grpo.rewards.scores import score_groups

ANSWER_CHECKERS = (*COMPARING, "countdown", "python_tests", "reasoning_gym")
"""The built-in rewards that check an answer."""


class Grader:
    """``grade(groups)``: the results of each group's completions, from the rewards of the run.

    Correct: the reward ``eval.correctness`` (by default the first that checks answers) is above
    ``correct_above``. Well-formed: the reward ``eval.format`` (by default ``format``) is above 0.
    Without it, a response is well-formed if it has an answer where ``accuracy`` looks for one
    (modes ``boxed``, ``####``), else if it has think and answer tags."""

    def __init__(
        self,
        config: EvalConfig,
        rewards: RewardRunner,
        trainer_state: TrainerState = OUTSIDE_TRAINING,
    ):
        names = rewards.names
        checkers = [name for name in names if name in ANSWER_CHECKERS]
        self.rewards = rewards
        self.trainer_state = trainer_state
        self.correct_above = config.correct_above
        self.correctness = config.correctness or (checkers or names)[0]
        self.format = config.format
        if self.format is None and "format" in names:
            self.format = "format"
        spec = rewards.specs[names.index(self.correctness)]
        self.mode = None
        if spec.name == "accuracy":
            self.mode = spec.args.get("mode")

    def __call__(self, groups: Sequence[Group]) -> list[list[CompletionResult]]:
        rows = iter(score_groups(self.rewards, groups, self.trainer_state).values)
        results = []
        for group in groups:
            graded = []
            for completion in group.completions:
                graded.append(self._grade(group.problem, completion, next(rows)))
            results.append(graded)
        return results

    def _grade(
        self,
        problem: Problem,
        completion: Completion,
        row: list[float | None],
    ) -> CompletionResult:
        rewards = dict(zip(self.rewards.names, row, strict=True))
        correctness = rewards[self.correctness]
        text = completion.text
        answer = problem.columns.get("answer")
        lenient = None
        if answer is not None:
            last_number = extract_answer(text, mode="lenient")
            lenient = equals_reference(last_number, answer)
        if self.format:
            formatted = (rewards[self.format] or 0.0) > 0
        elif self.mode in ("boxed", "####"):
            formatted = extract_answer(text, self.mode) is not None
        else:
            formatted = has_format(text)
        return CompletionResult(
            correct=correctness is not None and correctness > self.correct_above,
            formatted=formatted,
            lenient=lenient,
            length=len(completion.sampled_ids),
            truncated=not completion.finished,
            rewards=rewards,
            scored=correctness is not None,
            text=completion.transcript,
        )


def correctness_note(config: EvalConfig, names: Sequence[str]) -> str | None:
    """A note on the reward that decides what is correct, if nothing says that it checks answers."""
    if config.correctness or set(names) & set(ANSWER_CHECKERS):
        return None
    rule = f"evaluations count a completion as correct if {names[0]} > {config.correct_above:g}"
    return f"note: no reward is known to check answers, so {rule}; eval.correctness=REWARD chooses another"


def check_reward_names(config: EvalConfig, names: Sequence[str]) -> None:
    """``ValueError`` unless ``eval.correctness`` and ``eval.format`` are among the rewards."""
    unknown = {config.correctness, config.format} - {None, *names}
    if unknown:
        raise ValueError(
            f"eval.correctness and eval.format take one of {', '.join(names)}, not {unknown}"
        )

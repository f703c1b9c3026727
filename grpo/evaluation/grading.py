"""Grade completions with the rewards of a run. Grades say whether a completion is correct, whether
it is well-formed, and whether its last number is the reference answer."""

from collections.abc import Sequence

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.config import EvalConfig
from grpo.evaluation.estimate import CompletionResult, ResultsByProblem
from grpo.rewards import RewardRunner
from grpo.rewards.answers import equals_reference, extract_answer, has_format
from grpo.rewards.builtin import ANSWER_REWARDS
from grpo.rewards.calls import OUTSIDE_TRAINING, TrainerState
from grpo.rewards.scores import score_groups

ANSWER_CHECKERS = (*ANSWER_REWARDS, "countdown", "python_tests", "reasoning_gym")
"""Names of the built-in rewards that check an answer, not its form or length."""


class Grader:
    """Grader of completions by the rewards of a run. Call an instance with groups of completions.

    - A completion is correct if the reward ``eval.correctness`` is above ``eval.correct_above``.
      Default: the first reward that checks answers, or else the first reward.
    - A completion is well-formed if the reward ``eval.format`` is above 0. Default: the reward
      ``format``. If the run has no reward ``format``, the mode of the reward ``accuracy`` decides.
      In modes ``boxed`` and ``####``, a well-formed completion has an answer of that form. In all
      other cases, a well-formed completion has think and answer tags.
    """

    def __init__(
        self,
        config: EvalConfig,
        rewards: RewardRunner,
        trainer_state: TrainerState = OUTSIDE_TRAINING,
    ):
        names = rewards.names
        checkers = [name for name in names if name in ANSWER_CHECKERS]
        self.rewards = rewards
        self.errors = {}
        """Function name, or ``environment`` -> an error of the last call that failed."""
        self.trainer_state = trainer_state
        self.correct_above = config.correct_above
        self.correctness = config.correctness or (checkers or names)[0]
        self.format = config.format
        if self.format is None and "format" in names:
            self.format = "format"

        # The mode of `accuracy` says where a response has its answer. Other rewards do not say it.
        spec = rewards.specs[names.index(self.correctness)]
        self.mode = None
        if spec.name == "accuracy":
            self.mode = spec.args.get("mode")

    def __call__(self, groups: Sequence[Group]) -> ResultsByProblem:
        """Return the results of the completions of each group."""
        # All groups are scored at once: rewards run in parallel over the completions of one call.
        scored = score_groups(self.rewards, groups, self.trainer_state)
        self.errors |= scored.first_errors
        for failure in filter(None, scored.environment_failures):
            self.errors["environment"] = failure
        rows = iter(scored.values)
        return [
            [self._grade(group.problem, completion, next(rows)) for completion in group.completions]
            for group in groups
        ]

    def _grade(
        self,
        problem: Problem,
        completion: Completion,
        values: list[float | None],
    ) -> CompletionResult:
        """Return the result of one completion.

        ``values``: one value per reward, None if the reward could not score the completion.
        """
        rewards = dict(zip(self.rewards.names, values, strict=True))
        correctness = rewards[self.correctness]
        text = completion.text
        answer = problem.columns.get("answer")

        # Lenient accuracy ignores the form. Compared with accuracy, it shows whether a model learns
        # the format or learns to solve problems.
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

        # An unscored completion counts as wrong and is not left out: a reward that fails on hard
        # problems would otherwise raise the accuracy.
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
    """Return a note that names the reward that decides what is correct. The note is None if
    ``eval.correctness`` is set, or ``eval.correct_above`` with one reward, or if a reward is known
    to check answers."""
    is_set = "correct_above" in config.model_fields_set and len(names) == 1
    if is_set or config.correctness or set(names) & set(ANSWER_CHECKERS):
        return None
    return (
        "note: no reward is known to check answers, so evaluations count a completion as correct "
        f"if {names[0]} > {config.correct_above:g}; eval.correct_above=NUMBER sets another bar, "
        f"eval.correctness another reward, of {', '.join(names)} (set, it ends this note)"
    )


def check_reward_names(config: EvalConfig, names: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``eval.correctness`` and ``eval.format`` name rewards of the
    run."""
    unknown = {config.correctness, config.format} - {None, *names}
    if unknown:
        raise ValueError(
            f"eval.correctness and eval.format take one of {', '.join(names)}, not {unknown}"
        )

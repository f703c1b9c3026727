"""What became of a completion: right, well-formed, right to a lenient reader, how long, what each reward gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo.batch import Group
from grpo.rewards import RewardRunner
from grpo.rewards.extract import answers_equal, extract_answer, has_format
from grpo.rewards.groups import score_groups

ANSWER_CHECKERS = (
    "accuracy", "math_verify", "countdown", "r1_zero", "exact_or_stripped", "python_tests", "reasoning_gym",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What became of one completion."""

    correct: bool
    """The correctness reward gave more than ``correct_above`` (strict accuracy: that reward reads the answer's place)."""
    formatted: bool
    lenient: bool
    """The last number in the text equals the answer, tags or not."""
    length: int
    """Tokens."""
    truncated: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    """What each reward gave, without its weight; None where it could not score."""
    scored: bool = True
    """Whether the correctness reward gave a number; where it did not, the completion counts as wrong."""


Judge = Callable[[Sequence[Group]], list[list[Verdict]]]


def make_judge(
    score: Callable[[Sequence[Group]], list[dict[str, float | None]]],
    correctness: str,
    format_name: str | None,
    correct_above: float = 0.0,
) -> Judge:
    """A judge from the run's own rewards.

    Args:
        score: groups -> one ``{reward name: value}`` per completion, group by group.
        correctness: the reward that decides whether a completion is correct: its value is above ``correct_above``.
        format_name: the reward that decides on the format; None: ``<think>..</think> <answer>..</answer>``.
        correct_above: above 0 for rewards that give something for a wrong answer.
    """

    def judge(groups: Sequence[Group]) -> list[list[Verdict]]:
        values = iter(score(groups))
        verdicts = []
        for group in groups:
            row = []
            for completion in group.completions:
                value = next(values)
                answer = group.problem.columns.get("answer")
                last = extract_answer(completion.text, mode="lenient")
                row.append(
                    Verdict(
                        correct=value[correctness] is not None and value[correctness] > correct_above,
                        formatted=(value[format_name] or 0.0) > 0 if format_name else has_format(completion.text),
                        lenient=answer is not None and last is not None and answers_equal(last, str(answer)),
                        length=len(completion.ids),
                        truncated=not completion.finished,
                        rewards=value,
                        scored=value[correctness] is not None,
                    )
                )
            verdicts.append(row)
        return verdicts

    return judge


def judge_of(config, rewards: RewardRunner) -> Judge:
    """The judge that a ``Config`` describes: its rewards, its ``eval.correctness``, ``eval.correct_above`` and ``eval.format``."""
    names = rewards.names

    def score(groups: Sequence[Group]) -> list[dict[str, float | None]]:
        return [dict(zip(names, row, strict=True)) for row in score_groups(rewards, groups).values]

    correctness = config.eval.correctness or next((name for name in names if name in ANSWER_CHECKERS), names[0])
    format_name = config.eval.format or ("format" if "format" in names else None)
    return make_judge(score, correctness, format_name, config.eval.correct_above)


def check_names(config, names: Sequence[str]) -> None:
    """Refuse an ``eval.correctness`` or ``eval.format`` that names no reward.

    Raises:
        ValueError: naming the rewards there are.
    """
    for key in ("correctness", "format"):
        value = getattr(config.eval, key)
        if value is not None and value not in names:
            raise ValueError(f"eval.{key}={value}: no such reward; there are {', '.join(names)}")

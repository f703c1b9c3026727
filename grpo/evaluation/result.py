"""The result of evaluating one completion. Imports no torch, so that the estimates, which the report uses too, need none."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CompletionResult:
    """The evaluation result of one completion."""

    correct: bool
    """Whether the correctness reward is above ``eval.correct_above``."""
    formatted: bool
    lenient: bool
    """Whether the last number in the text equals the answer, with or without tags."""
    length: int
    """Tokens."""
    truncated: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    """The value of each reward, without its weight; None where the reward gave no score."""
    scored: bool = True
    """Whether the correctness reward gave a score. A completion without a score counts as wrong."""
    text: str | None = None
    """The completion's text; None if the evaluation does not keep texts."""

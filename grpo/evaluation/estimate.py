"""Metrics of an evaluation: rates, pass@k and means, each with a 95% interval. Imports no torch.

Samples of one problem are correlated, so one observation is the mean over the samples of one problem.

- Rates: Wilson's interval (1927) with the effective number of observations, ``p(1-p) / se^2``, where ``se`` is the
  standard error of the mean over problems (Kish, 1965; Dean and Pagano, 2015). With one sample per problem that number
  is N. The interval stays within [0, 1], and it has a width at 0 and N of N, where mean +- 2 se has none.
- Other means (lengths, rewards): mean +- 1.96 se over problems, accurate for more than about 30 problems.
- One problem does not show how problems differ: its samples are one observation of a rate, a mean has no interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo.evaluation.intervals import Z, wilson


@dataclass(frozen=True)
class CompletionResult:
    """The evaluation result of one completion."""

    correct: bool
    formatted: bool
    lenient: bool | None
    """True if the last number in the text equals the answer, with or without tags; None if the problem has none."""
    length: int
    truncated: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    """The value of each reward, without its weight; None where the reward could not score."""
    scored: bool = True
    """False if the correctness reward could not score the completion, which then counts as wrong."""
    text: str | None = None
    """None if the evaluation does not keep texts."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate, from n samples of which c are correct, of the probability that at least one of k is correct.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., 2021, eq. 1), with exact integers. ``ValueError`` if c or k exceeds n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"num_correct={num_correct} or k={k} is not possible with num_samples={num_samples}")
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


@dataclass(frozen=True)
class Estimate:
    """A metric with its 95% interval and, for a share, the exact count: ``count`` of ``of`` completions."""

    value: float
    low: float
    high: float
    count: int | None = None
    of: int | None = None


def rate_of(values: Sequence[float], samples: int, value: float | None = None) -> tuple[float, float, float]:
    """``(rate, low, high)`` from one number in [0, 1] per problem, each the mean of so many ``samples``.

    ``value`` is the rate, if it is known more exactly than the mean of ``values``.
    """
    N = len(values)
    mean = math.fsum(values) / N
    p = mean if value is None else value
    variance_of_mean = math.fsum((v - mean) ** 2 for v in values) / N / N
    # Between N (all samples of a problem have the same result) and N * samples (samples are independent).
    effective = p * (1 - p) / variance_of_mean if variance_of_mean > 0 else N if p in (0, 1) or N == 1 else N * samples
    return p, *wilson(p, min(max(effective, N), N * samples))


def mean_of(rows: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all values, with its interval over problems (NaN for fewer than two), one row each."""
    N, of = len(rows), sum(map(len, rows))
    if not of:
        return Estimate(math.nan, math.nan, math.nan, None, 0)
    mean = math.fsum(value for row in rows for value in row) / of
    if sum(map(bool, rows)) < 2:
        return Estimate(mean, math.nan, math.nan, None, of)
    # The mean is the ratio of two sums over problems. These are the residuals of the problems in its linearisation.
    residuals = [(math.fsum(row) - mean * len(row)) * N / of for row in rows]
    se = math.sqrt(math.fsum(r * r for r in residuals) / (N - 1) / N)
    return Estimate(mean, mean - Z * se, mean + Z * se, None, of)


def estimates(greedy: Sequence[CompletionResult], samples: Sequence[Sequence[CompletionResult]]) -> dict[str, Estimate]:
    """All metrics of an evaluation by name, from one greedy result per problem and equally many samples, or none.

    ``greedy_accuracy``; with samples, ``mean@<n>`` and ``pass@<k>`` for every k up to n. Of the samples, or else of the
    greedy completions, ``format``, ``lenient_accuracy``, ``mean_length``, ``truncated`` and ``rewards/<name>``; with
    samples, the first four of these for the greedy completions too, as ``greedy_...``.
    """
    greedy_rows = [[result] for result in greedy]
    found = {"greedy_accuracy": _share(greedy_rows, "correct")}
    if not samples:
        return found | _other_metrics(greedy_rows)
    n, num_correct = len(samples[0]), [sum(result.correct for result in row) for row in samples]
    found[f"mean@{n}"] = _share(samples, "correct")
    for k in range(1, n + 1):
        found[f"pass@{k}"] = Estimate(*rate_of([pass_at_k(n, c, k) for c in num_correct], n))
    of_greedy = {f"greedy_{name}": e for name, e in _other_metrics(greedy_rows).items() if "/" not in name}
    return found | _other_metrics(samples) | of_greedy


def metric_names(num_samples: int, rewards: Sequence[str]) -> list[str]:
    """The names, with ``eval/``, of the metrics of an evaluation; ``num_samples`` is 0 with greedy decoding only."""
    result = CompletionResult(False, False, False, 0, False, dict.fromkeys(rewards))
    return [f"eval/{name}" for name in estimates([result], [[result] * num_samples] if num_samples else [])]


def _other_metrics(rows: Sequence[Sequence[CompletionResult]]) -> dict[str, Estimate]:
    def mean_reward(name: str) -> Estimate:
        return mean_of([[r.rewards[name] for r in row if r.rewards[name] is not None] for row in rows])

    return {
        "format": _share(rows, "formatted"),
        "lenient_accuracy": _share(rows, "lenient"),
        "mean_length": mean_of([[result.length for result in row] for row in rows]),
        "truncated": _share(rows, "truncated"),
        **{f"rewards/{name}": mean_reward(name) for name in rows[0][0].rewards},
    }


def _share(rows: Sequence[Sequence[CompletionResult]], attribute: str) -> Estimate:
    """The share of completions for which an attribute of their result is true; problems with None are left out."""
    counts = []
    for row in rows:
        values = [getattr(result, attribute) for result in row]
        if None not in values:
            counts.append(sum(values))
    if not counts:
        return mean_of([])  # of nothing
    n = len(rows[0])
    count = sum(counts)
    of = n * len(counts)
    return Estimate(*rate_of([c / n for c in counts], n, count / of), count, of)

"""Metrics of an evaluation: rates, pass@k and means, each with a 95% interval. Imports no torch.

Samples of one problem are correlated, so one observation is the mean over the samples of one
problem.

- Rates: Wilson's interval (1927) with the effective number of observations, ``p(1-p) / se^2``,
  where ``se`` is the standard error of the mean over problems (Kish, 1965; Dean and Pagano, 2015).
  With one sample per problem that number is N. The interval stays within [0, 1], and it has a width
  at 0 and N of N, where mean +- 2 se has none.
- Other means (lengths, rewards): mean +- 1.96 se over problems, accurate for more than about 30
  problems.
- One problem does not show how problems differ: its samples are one observation of a rate, a mean
has no interval."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)  # 1.96 standard errors on each side of the mean


@dataclass(frozen=True)
class CompletionResult:
    """The evaluation result of one completion."""

    correct: bool
    formatted: bool
    lenient: bool | None
    """True if the last number in the text equals the answer, with or without tags; None if the
    problem has none."""
    length: int
    truncated: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    """The value of each reward, without its weight; None where the reward could not score."""
    scored: bool = True
    """False if the correctness reward could not score the completion, which then counts as
    wrong."""
    text: str | None = None


Rows = Sequence[Sequence[CompletionResult]]
"""The results of the completions of each problem."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate, from n samples of which c are correct, of the probability that at least
    one of k is correct.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., 2021, eq. 1), with exact integers. ``ValueError`` if
    c or k exceeds n."""
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"num_correct={num_correct} or k={k} is not possible with num_samples={num_samples}"
        )
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


@dataclass(frozen=True)
class Estimate:
    """A metric with its 95% interval and, for a share, the exact count: ``count`` of ``of``
    completions."""

    value: float
    low: float
    high: float
    count: int | None = None
    of: int | None = None


def wilson(rate: float, observations: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of a rate in [0, 1], from independent observations (not always
    whole)."""
    z2 = Z * Z / observations
    centre = (rate + z2 / 2) / (1 + z2)
    variance = rate * (1 - rate) / observations + z2 / (4 * observations)
    half = Z / (1 + z2) * math.sqrt(variance)
    # The interval contains the rate, also after rounding.
    low = min(centre - half, rate)
    high = max(centre + half, rate)
    return max(low, 0.0), min(high, 1.0)


def rate_of(
    values: Sequence[float],
    samples: int,
    value: float | None = None,
) -> tuple[float, float, float]:
    """``(rate, low, high)`` from one number in [0, 1] per problem, each the mean of so many
    ``samples``.

    ``value`` is the rate, if it is known more exactly than the mean of ``values``.
    """
    N = len(values)
    mean = math.fsum(values) / N
    p = mean if value is None else value
    variance_of_mean = math.fsum((v - mean) ** 2 for v in values) / N / N
    # Between N (all samples of a problem have the same result) and N * samples (samples are
    # independent).
    effective = N * samples
    if variance_of_mean > 0:
        effective = p * (1 - p) / variance_of_mean
    elif p in (0, 1) or N == 1:
        effective = N
    effective = min(max(effective, N), N * samples)
    return p, *wilson(p, effective)


def mean_of(rows: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all values, with its interval over problems (NaN for fewer than two), one row
    each."""
    mean = math.nan
    se = math.nan
    num_values = sum(map(len, rows))
    if num_values > 0:
        mean = math.fsum(itertools.chain(*rows)) / num_values
    if sum(map(bool, rows)) > 1:
        # The mean is the ratio of two sums over problems, which is linearised: each problem has a
        # residual.
        N = len(rows)
        squares = []
        for row in rows:
            residual = (math.fsum(row) - mean * len(row)) * N / num_values
            squares.append(residual * residual)
        se = math.sqrt(math.fsum(squares) / (N - 1) / N)
    return Estimate(mean, mean - Z * se, mean + Z * se)


def estimates(
    greedy: Sequence[CompletionResult],
    samples: Rows,
) -> dict[str, Estimate]:
    """All metrics of an evaluation by name, from one greedy result per problem and equally many
    samples, also none.

    ``eval/greedy_accuracy``; with samples, ``eval/mean@<n>`` and ``eval/pass@<k>`` for every k up
    to n. Of the samples, or else of the greedy completions, ``format``, ``lenient_accuracy``,
    ``mean_length``, ``truncated`` and ``rewards/<name>``; with samples, the first four of these for
    the greedy completions too, as ``greedy_...``."""
    greedy_rows = [[result] for result in greedy]
    found = {"eval/greedy_accuracy": _share(greedy_rows, "correct")}
    n = len(samples[0])
    if n == 0:
        return found | _other_metrics(greedy_rows, "eval/")

    found[f"eval/mean@{n}"] = _share(samples, "correct")
    for k in range(1, n + 1):
        shares = []
        for row in samples:
            num_correct = sum(result.correct for result in row)
            shares.append(pass_at_k(n, num_correct, k))
        found[f"eval/pass@{k}"] = Estimate(*rate_of(shares, n))
    found |= _other_metrics(samples, "eval/")
    for name, estimate in _other_metrics(greedy_rows, "eval/greedy_").items():
        if "rewards/" not in name:
            found[name] = estimate
    return found


def metric_names(num_samples: int, rewards: Sequence[str]) -> list[str]:
    """The names of the metrics of an evaluation; ``num_samples`` is 0 with greedy decoding only."""
    result = CompletionResult(False, False, False, 0, False, dict.fromkeys(rewards))
    return list(estimates([result], [[result] * num_samples]))


def _other_metrics(rows: Rows, prefix: str) -> dict[str, Estimate]:
    lengths = []
    for row in rows:
        lengths.append([result.length for result in row])
    found = {
        f"{prefix}format": _share(rows, "formatted"),
        f"{prefix}lenient_accuracy": _share(rows, "lenient"),
        f"{prefix}mean_length": mean_of(lengths),
        f"{prefix}truncated": _share(rows, "truncated"),
    }
    for name in rows[0][0].rewards:
        scores = []
        for row in rows:
            values = [result.rewards[name] for result in row]
            scores.append([value for value in values if value is not None])
        found[f"{prefix}rewards/{name}"] = mean_of(scores)
    return found


def _share(rows: Rows, attribute: str) -> Estimate:
    """The share of completions for which an attribute of their result is true; problems with None
    are left out."""
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
    shares = [c / n for c in counts]
    return Estimate(*rate_of(shares, n, count / of), count, of)

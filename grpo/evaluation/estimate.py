"""Metrics of an evaluation: rates, pass@k and means, each with a 95% interval. Needs no torch.

The samples of one problem are correlated, so the unit of observation is the problem. Its value is
the mean over its samples.

- Rates: Wilson's interval (1927) with the effective number of observations, ``p(1-p) / se^2``,
  where ``se`` is the standard error of the mean over problems (Kish, 1965; Dean and Pagano, 2015).
  With one sample per problem, the effective number is the number of problems. The interval stays
  within [0, 1]. If all problems are right or all are wrong, the interval still has a width above
  0, unlike mean +- 2 se.
- Other means (lengths, rewards): mean +- 1.96 se over problems, accurate for more than about 30
  problems.
- A single problem does not show how much problems differ. For a rate, the samples of a single
  problem count as one observation. A mean of lengths or rewards then has no interval.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import comb, fsum, nan, sqrt
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)
"""Half-width of a 95% interval, in standard errors: 1.96."""


@dataclass(frozen=True)
class CompletionResult:
    """The evaluation result of one completion."""

    correct: bool
    formatted: bool
    lenient: bool | None
    """True if the last number in the text equals the reference answer, whether or not it is in
    tags; None if the problem has no answer."""
    length: int
    """Number of tokens that the model sampled."""
    truncated: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    """The value of each reward, without its weight; None if the reward could not score the
    completion."""
    scored: bool = True
    """False if the correctness reward could not score the completion, which then counts as
    wrong."""
    text: str | None = None


ResultsByProblem = Sequence[Sequence[CompletionResult]]
"""The results of the completions of each problem. All problems have the same number of
completions."""


def pass_at_k(
    num_samples: int,
    num_correct: int,
    k: int,
) -> float:
    """Return an unbiased estimate of the probability that at least one of k samples is correct.

    The estimate is ``1 - C(n - c, k) / C(n, k)`` for n samples of which c are correct (Chen et al.,
    2021, eq. 1).

    Raises:
        ValueError: c or k exceeds n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"num_correct={num_correct} or k={k} is not possible with num_samples={num_samples}"
        )
    # Python's integers are exact: floats would lose the difference of two large binomials.
    num_subsets = comb(num_samples, k)
    num_wrong_subsets = comb(num_samples - num_correct, k)
    return (num_subsets - num_wrong_subsets) / num_subsets


@dataclass(frozen=True)
class Estimate:
    """A metric with its 95% interval. A metric that is a fraction of completions also has its
    numerator, ``count``, and its denominator, ``of``."""

    value: float
    low: float
    high: float
    count: int | None = None
    of: int | None = None


def wilson(rate: float, observations: float) -> tuple[float, float]:
    """Return ``(low, high)``, Wilson's score interval (1927) of a rate in [0, 1].

    ``observations``: the number of independent observations, not necessarily an integer.
    """
    correction = Z * Z / observations
    scale = 1 + correction
    centre = (rate + correction / 2) / scale
    sampling_variance = rate * (1 - rate) / observations
    variance = sampling_variance + correction / (4 * observations)
    half_width = Z / scale * sqrt(variance)

    # At a rate of 0 or 1, one bound equals the rate, and rounding could leave the rate outside the
    # interval.
    low = min(centre - half_width, rate)
    high = max(centre + half_width, rate)
    return max(low, 0.0), min(high, 1.0)


def rate_with_interval(
    values: Sequence[float],
    num_samples: int,
    exact_rate: float | None = None,
) -> tuple[float, float, float]:
    """Return a rate and the bounds of its 95% interval: ``(rate, low, high)``.

    Args:
        values: one value in [0, 1] per problem, the mean over the samples of the problem.
        num_samples: number of samples per problem.
        exact_rate: the rate, if the caller knows it without rounding errors. Default: the mean of
            ``values``.
    """
    num_problems = len(values)
    mean = fsum(values) / num_problems
    rate = mean if exact_rate is None else exact_rate
    squares = [(value - mean) ** 2 for value in values]
    variance_of_mean = fsum(squares) / num_problems / num_problems

    # The effective number of observations has the variance in its denominator, and the variance may
    # be 0. If all problems have the same rate between 0 and 1, the samples are assumed to be
    # independent. If all samples are right, or all are wrong, the samples of a problem may be
    # copies of one another. Each problem then counts once, which gives the wider interval. A single
    # problem counts once, too.
    num_completions = num_problems * num_samples
    observations = num_completions
    if variance_of_mean > 0:
        observations = rate * (1 - rate) / variance_of_mean
    elif rate in (0, 1) or num_problems == 1:
        observations = num_problems

    # The variance between few problems is noisy. The number of observations is therefore kept
    # between the number of problems (all samples of a problem are alike) and the number of
    # completions (all samples are independent).
    observations = min(max(observations, num_problems), num_completions)
    return rate, *wilson(rate, observations)


def mean_with_interval(values_by_problem: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of all values, with its 95% interval from the variance between problems.

    A problem may have any number of values, or none. If there are no values, the mean is NaN. If
    fewer than two problems have values, both bounds are NaN.
    """
    mean = nan
    se = nan
    num_values = sum(map(len, values_by_problem))
    if num_values > 0:
        mean = fsum(chain(*values_by_problem)) / num_values

    if sum(map(bool, values_by_problem)) > 1:
        # The mean is a ratio of two sums over problems, and both sums vary with the choice of
        # problems. The ratio is linearised (delta method), so that each problem contributes one
        # residual.
        num_problems = len(values_by_problem)
        squares = []
        for values in values_by_problem:
            residual = fsum(values) - mean * len(values)
            scaled = residual * num_problems / num_values
            squares.append(scaled * scaled)
        se = sqrt(fsum(squares) / (num_problems - 1) / num_problems)
    half_width = Z * se
    return Estimate(mean, mean - half_width, mean + half_width)


def estimate_metrics(
    greedy: Sequence[CompletionResult],
    samples: ResultsByProblem,
) -> dict[str, Estimate]:
    """Return all metrics of an evaluation by name.

    The accuracies are ``eval/greedy_accuracy`` and, with samples, ``eval/mean@<n>`` and
    ``eval/pass@<k>`` for every k up to n. The other metrics are ``eval/format``,
    ``eval/lenient_accuracy``, ``eval/mean_length``, ``eval/truncated`` and ``eval/rewards/<name>``.
    Without samples, these other metrics are computed over the greedy completions. With samples,
    they are computed over the samples; all except the rewards are then also computed over the
    greedy completions, under the names ``eval/greedy_<metric>``.

    Args:
        greedy: one result per problem.
        samples: n results per problem; n may be 0.
    """
    greedy_results = [[result] for result in greedy]
    metrics = {"eval/greedy_accuracy": _rate_of_attribute(greedy_results, "correct")}
    n = len(samples[0])
    rewards = greedy[0].rewards
    if n == 0:
        return metrics | _completion_metrics(greedy_results, "eval/", rewards)

    metrics[f"eval/mean@{n}"] = _rate_of_attribute(samples, "correct")
    for k in range(1, n + 1):
        probabilities = []
        for results in samples:
            num_correct = sum(result.correct for result in results)
            probabilities.append(pass_at_k(n, num_correct, k))
        metrics[f"eval/pass@{k}"] = Estimate(*rate_with_interval(probabilities, n))
    metrics |= _completion_metrics(samples, "eval/", rewards)
    return metrics | _completion_metrics(greedy_results, "eval/greedy_")


def metric_names(num_samples: int, rewards: Sequence[str]) -> list[str]:
    """Return the names of the metrics of an evaluation. With greedy decoding only, ``num_samples``
    is 0."""
    # The names come from the estimates of one made-up problem, so they cannot differ from the names
    # of a real evaluation.
    result = CompletionResult(False, False, False, 0, False, dict.fromkeys(rewards))
    return list(estimate_metrics([result], [[result] * num_samples]))


def _completion_metrics(
    results_by_problem: ResultsByProblem,
    prefix: str,
    rewards: Iterable[str] = (),
) -> dict[str, Estimate]:
    """Return the metrics that are averages over single completions, except accuracy.

    ``rewards``: names of the rewards whose mean is among the metrics.
    """
    lengths = [[result.length for result in results] for results in results_by_problem]
    metrics = {
        f"{prefix}format": _rate_of_attribute(results_by_problem, "formatted"),
        f"{prefix}lenient_accuracy": _rate_of_attribute(results_by_problem, "lenient"),
        f"{prefix}mean_length": mean_with_interval(lengths),
        f"{prefix}truncated": _rate_of_attribute(results_by_problem, "truncated"),
    }
    for name in rewards:
        scores = []
        for results in results_by_problem:
            values = [result.rewards[name] for result in results]
            # A completion that could not be scored counts as wrong, but its reward is unknown: a 0
            # would move the mean of a reward that is never 0.
            scores.append([value for value in values if value is not None])
        metrics[f"{prefix}rewards/{name}"] = mean_with_interval(scores)
    return metrics


def _rate_of_attribute(results_by_problem: ResultsByProblem, attribute: str) -> Estimate:
    """Return the share of completions whose result has a true ``attribute``.

    Problems where the attribute is None are left out. If no problem is left, the rate is NaN.
    """
    counts = []
    for results in results_by_problem:
        values = [getattr(result, attribute) for result in results]
        # Only `lenient` may be None: it is None for all completions of a problem without a
        # reference answer.
        if None not in values:
            counts.append(sum(values))
    if not counts:
        return mean_with_interval([])
    n = len(results_by_problem[0])
    count = sum(counts)
    num_completions = n * len(counts)
    rates = [count_of_problem / n for count_of_problem in counts]
    # A mean of rounded rates, such as thirds, may miss the exact rate in the last digit.
    rate = count / num_completions
    return Estimate(*rate_with_interval(rates, n, rate), count, num_completions)

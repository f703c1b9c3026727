"""From verdicts to numbers one can quote: rates, pass@k, means, each with a 95% interval whose unit is the problem.

Samples of one problem resemble one another, so that N problems with n samples each say less than N*n independent ones: what counts
as one observation is a problem's own mean over its samples.

- Rates: Wilson's interval (1927) at the effective number of observations, ``p(1-p) / se^2``, where ``se`` is the standard error of
  the mean over problems (the effective size of a cluster sample: Kish, 1965; with Wilson's interval: Dean and Pagano, 2015). With
  one sample a problem that number is N and the interval is the plain Wilson one. It never leaves [0, 1], and at 0 or N of N it
  still has a width, which mean +- 2 se has not.
- Means that are no rates (lengths, rewards): mean +- 1.96 se over problems; fair for more than about 30 problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.evaluation.verdict import Verdict
from grpo.telemetry.intervals import Z, wilson


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of ``k`` samples is correct, estimated without bias from ``num_samples`` of them.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., 2021, eq. 1), with exact integers.

    Raises:
        ValueError: unless ``0 <= num_correct <= num_samples`` and ``1 <= k <= num_samples``.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct} must lie in [0, num_samples={num_samples}]")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} must lie in [1, num_samples={num_samples}]")
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


@dataclass(frozen=True)
class Estimate:
    """A number, its 95% interval, and the exact count behind it where there is one (``count`` of ``of`` completions)."""

    value: float
    low: float
    high: float
    count: int | None = None
    of: int | None = None


def rate_of(values: Sequence[float], samples: int, value: float | None = None) -> tuple[float, float, float]:
    """A rate and its interval from one number in [0, 1] per problem, each from ``samples`` completions."""
    N = len(values)
    mean = math.fsum(values) / N
    p = mean if value is None else value
    variance_of_mean = math.fsum((v - mean) ** 2 for v in values) / N / N
    # Between N (samples of a problem are all alike) and N * samples (as good as independent).
    effective = p * (1 - p) / variance_of_mean if variance_of_mean > 0 else N if p in (0.0, 1.0) else N * samples
    return p, *wilson(p, min(max(effective, N), N * samples))


def mean_of(rows: Sequence[Sequence[float]]) -> Estimate:
    """The mean over completions of some numbers per problem (not as many for each), with its interval over problems."""
    N, of = len(rows), sum(map(len, rows))
    if not of:
        return Estimate(math.nan, math.nan, math.nan, None, 0)
    mean = math.fsum(value for row in rows for value in row) / of
    # A ratio of two sums over problems; what each problem adds to it beyond its share.
    residuals = [(math.fsum(row) - mean * len(row)) * N / of for row in rows]
    se = math.sqrt(math.fsum(r * r for r in residuals) / max(N - 1, 1) / N)
    return Estimate(mean, mean - Z * se, mean + Z * se, None, of)


def estimates(greedy: Sequence[Verdict], samples: Sequence[Sequence[Verdict]]) -> dict[str, Estimate]:
    """Every metric of an evaluation, by its name without ``eval/``.

    Args:
        greedy: one verdict per problem.
        samples: the verdicts of each problem's samples, as many for each; empty if there was nothing but greedy decoding.

    Returns:
        ``greedy_accuracy``; with samples ``mean@<n>`` and ``pass@<k>`` for every k up to n; then ``format``, ``lenient_accuracy``,
        ``mean_length``, ``truncated`` and ``rewards/<name>`` over the samples if there are any, else over the greedy completions;
        with samples the first four for the greedy completions too, as ``greedy_...``.
    """
    alone = [[verdict] for verdict in greedy]
    found = {"greedy_accuracy": _share(alone, "correct")}
    if samples:
        n = len(samples[0])
        found[f"mean@{n}"] = _share(samples, "correct")
        for k in range(1, n + 1):
            passed = [pass_at_k(n, sum(verdict.correct for verdict in row), k) for row in samples]
            found[f"pass@{k}"] = Estimate(*rate_of(passed, n))
        found |= _rest(samples)
        found |= {f"greedy_{name}": e for name, e in _rest(alone).items() if "/" not in name}
    else:
        found |= _rest(alone)
    return found


def metric_names(num_samples: int, rewards: Sequence[str]) -> list[str]:
    """What an evaluation with so many samples reports, as it is logged."""
    verdict = Verdict(
        correct=False, formatted=False, lenient=False, length=0, truncated=False, rewards=dict.fromkeys(rewards)
    )
    return [f"eval/{name}" for name in estimates([verdict], [[verdict] * num_samples] if num_samples > 1 else [])]


def _rest(rows: Sequence[Sequence[Verdict]]) -> dict[str, Estimate]:
    found = {
        "format": _share(rows, "formatted"),
        "lenient_accuracy": _share(rows, "lenient"),
        "mean_length": mean_of([[verdict.length for verdict in row] for row in rows]),
        "truncated": _share(rows, "truncated"),
    }
    for name in rows[0][0].rewards:
        values = [[verdict.rewards[name] for verdict in row] for row in rows]
        found[f"rewards/{name}"] = mean_of([[v for v in row if v is not None] for row in values])
    return found


def _share(rows: Sequence[Sequence[Verdict]], what: str) -> Estimate:
    counts = [sum(getattr(verdict, what) for verdict in row) for row in rows]
    n = len(rows[0])
    of = n * len(rows)
    return Estimate(*rate_of([c / n for c in counts], n, sum(counts) / of), sum(counts), of)

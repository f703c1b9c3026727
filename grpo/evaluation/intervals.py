"""95% confidence intervals: of a rate, for the evaluation and the report; of a mean over a few seeds, for a sweep."""

import math
import statistics
from collections.abc import Sequence
from statistics import NormalDist

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)  # 1.96 standard errors on each side of the mean
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% quantiles of Student's t distribution with 1 to 30 degrees of freedom: in place of ``Z``."""


def wilson(rate: float, observations: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of a rate in [0, 1], from independent observations (not always whole)."""
    z2 = Z * Z / observations
    centre = (rate + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(rate * (1 - rate) / observations + z2 / (4 * observations))
    low, high = min(centre - half, rate), max(centre + half, rate)  # contains the rate, also after rounding
    return max(low, 0.0), min(high, 1.0)


def student(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of a mean of n values: mean +- t s / sqrt(n), with n - 1 degrees of freedom."""
    n = len(values)
    t = STUDENT[n - 2] if n - 2 < len(STUDENT) else Z + (Z**3 + Z) / (4 * (n - 1))  # Cornish and Fisher; right to 0.2%
    half = t * statistics.stdev(values) / math.sqrt(n)
    mean = statistics.fmean(values)
    return mean - half, mean + half

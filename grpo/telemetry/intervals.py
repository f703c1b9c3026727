"""The 95% confidence interval of a rate, for the evaluation and for the report."""

import math
from statistics import NormalDist

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)  # 1.96 standard errors on each side of the mean


def wilson(rate: float, observations: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of a rate in [0, 1], from a number of independent observations (above 0, not always whole)."""
    z2 = Z * Z / observations
    centre = (rate + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(rate * (1 - rate) / observations + z2 / (4 * observations))
    low, high = min(centre - half, rate), max(centre + half, rate)  # contains the rate, also after rounding
    return max(low, 0.0), min(high, 1.0)

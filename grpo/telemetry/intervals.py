"""The 95% confidence interval of a rate, for the evaluation and for the report."""

import math
from statistics import NormalDist

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
"""Standard errors on each side of the mean: 1.96."""


def wilson(rate: float, observations: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of a rate.

    Args:
        rate: in [0, 1].
        observations: number of independent observations, above 0. It may be an effective number, which is not whole.
    """
    z2 = Z * Z / observations
    centre = (rate + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(rate * (1 - rate) / observations + z2 / (4 * observations))
    return max(min(centre - half, rate), 0.0), min(
        max(centre + half, rate), 1.0
    )  # contains the rate, also after rounding

"""The intervals of Wilson and of Student: numbers worked out by hand, and an integral."""

import math

import pytest

from grpo.evaluation.intervals import STUDENT, Z, student, wilson


def test_wilsons_interval():
    # 8 of 10: (0.8 + 3.8415 / 20 +- 1.96 sqrt(0.016 + 3.8415 / 400)) / (1 + 3.8415 / 10)
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0.0, 100) == pytest.approx((0.0, 0.03699), abs=1e-4)
    assert wilson(1.0, 100) == pytest.approx((1 - 0.03699, 1.0), abs=1e-4)
    assert wilson(575 / 1319, 1319) == pytest.approx((0.4094, 0.4628), abs=1e-4)


def test_students_interval():
    # 1, 2, 3: s.d. 1, t of 2 degrees of freedom 4.303: 2 +- 4.303 / sqrt(3)
    assert student([1.0, 2.0, 3.0]) == pytest.approx((-0.48434, 4.48434), abs=1e-5)
    assert student([0.5, 0.7]) == pytest.approx((0.6 - 1.2706, 0.6 + 1.2706))
    low, high = student([0.0, 1.0] * 50)
    assert high - 0.5 == pytest.approx(1.9842 * 0.502519 / 10, rel=1e-3) and low == pytest.approx(1 - high)
    assert student([0.25] * 3) == (0.25, 0.25)


def test_the_quantiles_of_students_distribution():
    """Each holds 95% of the density between minus and plus itself (Simpson's rule)."""
    for degrees, t in enumerate(STUDENT, 1):
        factor = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        n, density = 400, lambda x, nu=degrees: (1 + x * x / nu) ** (-(nu + 1) / 2)
        total = sum((1 if i in (0, n) else 4 if i % 2 else 2) * density(i * t / n) for i in range(n + 1))
        assert 2 * factor * total * t / n / 3 == pytest.approx(0.95, abs=6e-5), degrees
    assert STUDENT[-1] > Z

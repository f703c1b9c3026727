"""Wilson's interval: numbers worked out by hand."""

import pytest

from grpo.telemetry.intervals import wilson


def test_wilsons_interval():
    # 8 of 10: (0.8 + 3.8415 / 20 +- 1.96 sqrt(0.016 + 3.8415 / 400)) / (1 + 3.8415 / 10)
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0.0, 100) == pytest.approx((0.0, 0.03699), abs=1e-4)
    assert wilson(1.0, 100) == pytest.approx((1 - 0.03699, 1.0), abs=1e-4)

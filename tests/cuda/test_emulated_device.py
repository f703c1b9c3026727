"""The emulated device notices what a GPU would refuse: each planted mistake is found, and sound code passes."""

import pytest
from emulated_cuda import ScenarioFailed


def test_sound_code_passes_and_its_kernels_are_counted(gpu):
    report = gpu.run("scenarios.adds_up", count=3)
    assert report.returned == 3.0 and report.problems == []
    assert report.kernels == {"ones": 1, "sum": 1}
    (sync,) = report.syncs
    assert "return total.item()" in sync and "scenarios.py" in sync


def test_tensors_of_two_devices_are_refused(gpu):
    report = gpu.run("scenarios.mixes_devices")
    assert "all tensors to be on the same device" in report.returned
    assert len(report.problems) == 1 and "a CPU tensor of shape (3,)" in report.problems[0]


def test_a_scenario_that_raises_fails_with_its_traceback(gpu):
    with pytest.raises(ScenarioFailed, match=r"ones\(\): argument 'size'"):
        gpu.run("scenarios.adds_up", count="three")

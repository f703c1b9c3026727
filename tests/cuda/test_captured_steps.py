"""Decode steps in CUDA graphs on the emulated device (scenarios: ``graph_scenarios.py``)."""

import pytest


def test_an_invalidated_capture_leaves_no_memory_pool_in_use(gpu, tmp_path):
    report = gpu.run("graph_scenarios.is_invalidated", folder=str(tmp_path))
    (line,) = report.returned["said"]
    assert "during capture" in line
    assert report.returned["equal"]
    assert not any("pool" in problem for problem in report.problems)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_each_step_counts_the_ranks_that_sample_without_graphs(gpu, tmp_path, fails):
    report = gpu.run("graph_scenarios.trains_after_a_failed_capture", folder=str(tmp_path), fails=fails)
    steps = [line for line in report.returned if line["step"]]
    assert [line["sampling/ranks_without_graphs"] for line in steps] == [float(fails)] * 2
    assert ("are not captured in CUDA graphs (division by zero)" in report.output) == fails

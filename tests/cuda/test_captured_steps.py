"""Decode steps in CUDA graphs on the emulated device (scenarios: ``graph_scenarios.py``)."""

import pytest

pytestmark = pytest.mark.slow

MOST_KERNELS = {"bf16": 31, "fp32": 32}
"""Of a layer of a captured step, equal groups. (41 with scatter and gather in every step.)"""


def test_after_an_invalidated_capture_the_loop_goes_on(gpu, tmp_path):
    report = gpu.run("graph_scenarios.is_invalidated", folder=str(tmp_path))
    (line,) = report.returned["said"]
    assert "when stream is capturing" in line
    assert report.returned["equal"]


@pytest.mark.parametrize("fails", [False, True])
def test_each_step_counts_the_ranks_that_sample_without_graphs(gpu, tmp_path, fails):
    report = gpu.run("graph_scenarios.trains_after_a_failed_capture", folder=str(tmp_path), fails=fails)
    steps = [line for line in report.returned if line["step"]]
    assert [line["sampling/ranks_without_graphs"] for line in steps] == [float(fails)] * 2
    assert ("are not captured in CUDA graphs (division by zero)" in report.output) == fails


def test_a_run_that_keeps_the_sampling_mask_decodes_without_graphs_and_says_so(gpu, tmp_path):
    settings = ["rollout.top_p=0.8", "rollout.keep_sampling_mask=true", "algorithm.num_iterations=2"]
    report = gpu.run("scenarios.trains", folder=str(tmp_path), settings=settings)
    steps = [line for line in report.returned["lines"] if line["step"]]
    assert [line["sampling/ranks_without_graphs"] for line in steps] == [1.0, 1.0]
    assert all(line["sampling/logprob_difference"] < 2e-2 for line in steps)
    assert "rollouts decode without CUDA graphs" in report.output and not report.problems


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_kernels_of_a_layer(gpu, tmp_path, precision):
    """Without scatter and gather as long as all groups have as many rows."""
    report = gpu.run("graph_scenarios.kernels_per_layer", folder=str(tmp_path), precision=precision)
    equal, unequal = (report.returned[name] for name in ("equal groups", "unequal groups"))
    assert sum(equal.values()) <= MOST_KERNELS[precision] and not {"new_zeros", "index"} & set(equal)
    assert sum(unequal.values()) <= MOST_KERNELS[precision] + 7

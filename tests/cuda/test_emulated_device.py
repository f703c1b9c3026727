"""The emulated device notices what a GPU would refuse: each planted mistake is found, and sound code passes."""

import pytest
from emulated_cuda import ScenarioFailed

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    ("dtype", "mask", "groups", "kernel"),
    [
        ("bfloat16", False, 2, "flash bfloat16"),
        ("bfloat16", True, 1, "efficient bfloat16"),
        ("float32", False, 1, "efficient float32"),
        ("float32", False, 2, "math float32"),
        ("bfloat16", True, 2, "math bfloat16"),
    ],
)
def test_attention_by_the_math_kernel_is_a_problem(gpu, dtype, mask, groups, kernel):
    report = gpu.run("scenarios.attends", dtype=dtype, mask=mask, groups=groups)
    assert report.returned == kernel
    assert len(report.problems) == kernel.startswith("math")


def test_graphs_read_and_write_their_memory_when_replayed(gpu):
    report = gpu.run("scenarios.captures", what="nothing wrong")
    assert report.returned == [6.0] * 4 and report.problems == []
    assert (report.captured, report.replays) == ([2], 1)


def test_a_graph_that_reads_freed_memory_is_a_problem(gpu):
    report = gpu.run("scenarios.captures", what="freed memory")
    assert any("a graph reads freed memory: (4,) torch.float32" in problem for problem in report.problems)


def test_a_host_sync_cannot_be_captured(gpu):
    with pytest.raises(ScenarioFailed, match="illegal while capturing: _local_scalar_dense"):
        gpu.run("scenarios.captures", what="sync")


def test_operations_that_are_not_deterministic_are_refused(gpu):
    with pytest.raises(ScenarioFailed, match="cumsum_cuda_kernel does not have a deterministic implementation"):
        gpu.run("scenarios.is_not_deterministic")


def test_memory_is_bounded_and_measured(gpu):
    assert gpu.run("scenarios.runs_out_of_memory").returned >= 2**20

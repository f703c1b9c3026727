"""Decode steps that are captured and replayed on the emulated CUDA device give the tokens of the loop, and mistakes in them are found."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replayed_graphs_give_the_loops_tokens_across_weight_updates(gpu, tmp_path, precision):
    report = gpu.run("scenarios.replays", folder=str(tmp_path), precision=precision)
    assert report.problems == [] and report.returned["said"] == []
    assert report.replays > 60
    if precision == "fp32":
        assert report.returned["equal"] == [1.0] * 3
    else:
        assert min(report.returned["equal"]) > 0.7


def test_a_refresh_that_changes_addresses_is_found(gpu, tmp_path):
    report = gpu.run("scenarios.replays", folder=str(tmp_path), precision="bf16", mistake="stale address")
    assert any("a graph reads freed memory" in problem for problem in report.problems)
    assert min(report.returned["equal"][1:]) < 0.5


@pytest.mark.parametrize(
    ("mistake", "reason"), [("host sync", "called a synchronizing CUDA operation"), ("CPU tensor", "the same device")]
)
def test_a_step_that_cannot_be_captured_is_found_and_decoded_by_the_loop(gpu, tmp_path, mistake, reason):
    report = gpu.run("scenarios.replays", folder=str(tmp_path), precision="fp32", mistake=mistake)
    assert len(report.returned["said"]) == 1 and reason in report.returned["said"][0]
    assert report.returned["equal"] == [1.0] * 3 and report.captured == []
    assert mistake == "host sync" or any("two devices" in problem for problem in report.problems)

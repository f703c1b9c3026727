"""``train_grpo.py`` and ``benchmarks/gpu.py`` on the emulated CUDA device."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "settings",
    [
        ["runtime.precision=bf16", "algorithm.num_minibatches=2", "algorithm.beta=0.1"],
        ["lora.rank=4", "model.gradient_checkpointing=true", "rollout.top_p=0.8"],
    ],
)
def test_two_steps(gpu, tmp_path, settings):
    lines, output = gpu.run("trains", folder=str(tmp_path), settings=settings)
    assert "not captured" not in output
    steps = [line for line in lines if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["grad_norm"] > 0 and line["sampling/logprob_difference"] < 2e-2


def test_checks_of_the_benchmark_pass(gpu, tmp_path):
    names = ["exact", "step", "graphs_fp32"]
    results, _ = gpu.run("benchmark", folder=str(tmp_path), only=names)
    assert results == {"code": 0, "machine": "passed"} | dict.fromkeys(names, "passed")


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        ("other position", "captures, equal tokens"),
        ("host sync", "are not captured in CUDA graphs"),
        ("freed memory", "a graph reads freed memory"),
    ],
)
def test_graphs_fail_where_something_is_broken(gpu, tmp_path, mistake, why):
    results, _ = gpu.run("benchmark", folder=str(tmp_path), only=["graphs_fp32"], mistake=mistake)
    assert results["code"] == 1 and why in results["graphs_fp32"]

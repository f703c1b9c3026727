"""``train_grpo.py`` and ``benchmarks/gpu.py`` on the emulated CUDA device."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "settings",
    [
        ["runtime.precision=bf16", "algorithm.num_minibatches=2", "algorithm.beta=0.1"],
        ["lora.rank=4", "model.gradient_checkpointing=true", "rollout.top_p=0.8", "rollout.keep_sampling_mask=true"],
    ],
)
def test_two_steps(gpu, tmp_path, settings):
    lines, output = gpu.run("trains", folder=str(tmp_path), settings=settings)
    assert "not captured" not in output
    steps = [line for line in lines if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["grad_norm"] > 0 and line["sampling/logprob_difference"] < 2e-2


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("ones + torch.ones(4)", "all tensors to be on the same device"),
        ("ones.sum().item()", "not permitted when stream is capturing"),
        ("torch.ones(2**18, device='cuda')", "CUDA out of memory"),
    ],
)
def test_the_device_refuses_what_a_gpu_refuses(gpu, expression, error):
    with pytest.raises(AssertionError, match=error):
        gpu.run("evaluates", expression=expression)


def test_checks_of_the_benchmark_pass(gpu, tmp_path):
    names = ["exact", "all", "graphs_fp32", "memory"]
    results, _ = gpu.run("benchmark", folder=str(tmp_path), only=names)
    assert results == {"code": 0, "machine": "passed"} | dict.fromkeys(names, "passed")


@pytest.mark.parametrize(
    ("name", "mistake", "why"),
    [
        ("exact", "wrong kernel", "fp32 packed"),
        ("graphs_fp32", "other position", "captures, equal tokens"),
        ("graphs_fp32", "host sync", "are not captured in CUDA graphs"),
        ("graphs_fp32", "freed memory", "a graph reads freed memory"),
        ("memory", "short trial", "CUDA out of memory"),
    ],
)
def test_checks_fail_where_something_is_broken(gpu, tmp_path, name, mistake, why):
    results, _ = gpu.run("benchmark", folder=str(tmp_path), only=[name], mistake=mistake)
    assert results["code"] == 1 and why in results[name]


def test_a_crash_or_hang_stops_no_other(gpu, tmp_path):
    results, _ = gpu.run("survives", folder=str(tmp_path))
    assert results == {
        "code": 1,
        "machine": "passed",
        "crashes": "failed: exit status -11",
        "hangs": "not run: not done in time",
        "passes": "passed",
    }

"""``train_grpo.py`` on the emulated CUDA device: from start to checkpoint without anything that a GPU would refuse."""

import emulated_cuda
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        ("qwen2", "bf16"),
        ("qwen2", "fp32"),
        ("qwen3", "bf16"),
        ("llama3", "bf16"),
        ("gemma3", "fp32"),
        ("gemma3", "bf16"),
    ],
)
def test_two_steps(gpu, tmp_path, architecture, precision):
    settings = [f"runtime.precision={precision}"]
    report = gpu.run("scenarios.trains", folder=str(tmp_path), architecture=architecture, settings=settings)
    assert report.problems == []
    can_pack = architecture != "gemma3"
    assert ("computed once per completion" in report.output) != can_pack, "packing was lost"
    assert "not captured" not in report.output
    assert (len(report.captured) >= 2 and report.replays > 20) == can_pack
    assert not any(kernel.startswith("math") for kernel in report.attention)
    steps = [line for line in report.returned["lines"] if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2] and all(line["grad_norm"] > 0 for line in steps)
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.mark.parametrize(
    "setting",
    [
        "model.gradient_checkpointing=true",
        "runtime.deterministic=true",
        "runtime.profile=1",
        "checkpoint={save_steps: 1, background: true}",
        "runtime.packed=false",
        "algorithm.num_minibatches=2",
        "lora.rank=4",
    ],
)
def test_settings(gpu, tmp_path, setting):
    report = gpu.run("scenarios.trains", folder=str(tmp_path), settings=[setting])
    assert report.problems == []
    assert (len(report.captured) > 0) == (setting != "runtime.packed=false")
    if "profile" in setting:
        assert (tmp_path / "run" / "trace_step_1.json.gz").exists()
    if "background" in setting:
        assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_a_container_that_switches_tf32_on_loses_nothing(tmp_path):
    if reason := emulated_cuda.why_impossible():
        pytest.skip(reason)
    emulator = emulated_cuda.Emulator({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"})
    try:
        report = emulator.run("scenarios.trains", folder=str(tmp_path))
    finally:
        emulator.close()
    assert report.problems == [] and report.returned["products"] == "tf32"
    assert "computed once per completion" not in report.output and "not captured" not in report.output
    assert report.replays > 20


@pytest.mark.parametrize("tf32", ["allow_tf32", None, "fp32_precision"])
def test_checks_at_start_pass_where_products_are_in_tf32(gpu, tmp_path, tf32):
    found = gpu.run("scenarios.checks", folder=str(tmp_path), tf32=tf32).returned
    assert found["plain head"] and found["packing"] is None and found["written-out decode"]
    assert found["before"] == found["after"] == ("none" if tf32 is None else "tf32")
    assert found["rounds products"] == (tf32 is not None)

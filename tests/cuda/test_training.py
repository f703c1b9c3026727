"""``train_grpo.py`` on the emulated CUDA device: from start to checkpoint without anything that a GPU would refuse."""

import pytest


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("qwen2", "bf16")]
    + [
        pytest.param(architecture, precision, marks=pytest.mark.slow)
        for architecture in ("qwen2", "qwen3", "llama3", "gemma3")
        for precision in ("fp32", "bf16")
        if (architecture, precision) != ("qwen2", "bf16")
    ],
)
def test_two_steps(gpu, tmp_path, architecture, precision):
    report = gpu.run("training.trains", folder=str(tmp_path), architecture=architecture, precision=precision)
    assert report.problems == []
    has_window = architecture == "gemma3"
    assert ("computed once per completion" in report.output) == has_window, "packing was lost"
    assert "not captured in CUDA graphs" not in report.output
    assert (len(report.captured) >= 2 and report.replays > 20) == (not has_window)
    assert not any(name.startswith("math") for name in report.attention)
    steps = [line for line in report.returned if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["skipped_updates"] == 0 and line["grad_norm"] > 0 for line in steps) if "skipped_updates" in steps[0] else True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "sign"),
    [
        ("model.gradient_checkpointing=true", ""),
        ("runtime.deterministic=true", ""),
        ("runtime.profile=1", "profile"),
        ("checkpoint.save_steps=1", ""),
    ],
)
def test_settings(gpu, tmp_path, setting, sign):
    report = gpu.run("training.trains", folder=str(tmp_path), settings=[setting])
    assert report.problems == [] and sign in report.output

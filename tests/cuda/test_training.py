"""``train_grpo.py`` and its decode steps in CUDA graphs, on the emulated device."""

import pytest

pytestmark = pytest.mark.slow

SAVES = "checkpoint={save_steps: 1}"
KEEPS_MASK = ("rollout.top_p=0.8", "rollout.keep_sampling_mask=true", "algorithm.num_iterations=2")


@pytest.mark.parametrize(
    ("architecture", "precision", "settings", "note"),
    [
        ("qwen2", "bf16", ("algorithm.num_minibatches=2", "model.gradient_checkpointing=true"), None),
        ("qwen2", "tf32", ("runtime.deterministic=true", SAVES), None),
        ("qwen3", "bf16", ("lora.rank=4",), None),
        ("gemma3_text", "bf16", (), "computed once per completion"),
        ("qwen2", "fp32", ("model.disable_dropout=false",), "transformers' decode step"),
        ("qwen2", "fp32", KEEPS_MASK, "saved "),
    ],
)
def test_two_steps(gpu, tmp_path, architecture, precision, settings, note):
    options = dict(architecture=architecture, precision=precision, settings=settings)
    report = gpu.run("scenarios.trains", folder=str(tmp_path), **options)
    assert report.problems == []
    if note:
        assert note in report.output
    else:
        assert "computed once per completion" not in report.output and "not captured" not in report.output
        assert report.replays > 20
    steps = [line for line in report.returned if line["step"]]
    assert [line["step"] for line in steps] == [1, 2] and all(line["grad_norm"] > 0 for line in steps)
    assert precision == "bf16" or all(line["sampling/logprob_difference"] < 2e-2 for line in steps)
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replayed_graphs_give_the_loops_tokens_across_weight_updates(gpu, tmp_path, precision):
    report = gpu.run("scenarios.replays", folder=str(tmp_path), precision=precision)
    assert report.problems == [] and report.returned["said"] == []
    assert report.replays > 60
    assert min(report.returned["equal"]) >= (1.0 if precision == "fp32" else 0.7)


def test_a_step_that_reads_freed_memory_is_found(gpu, tmp_path):
    report = gpu.run("scenarios.replays", folder=str(tmp_path), precision="fp32", mistake="reads_what_is_freed")
    assert any("a graph reads freed memory" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [("syncs", "called a synchronizing CUDA operation"), ("syncs_when_captured", "when stream is capturing")],
)
def test_a_step_that_cannot_be_captured_is_decoded_by_the_loop(gpu, tmp_path, mistake, reason):
    report = gpu.run("scenarios.replays", folder=str(tmp_path), precision="fp32", mistake=mistake)
    (line,) = report.returned["said"]
    assert "are not captured in CUDA graphs" in line and reason in line
    assert report.returned["equal"] == [1.0] * 3 and report.replays == 0

"""The two runs a person starts first, with the figures they are promised."""

import pytest
from conftest import run_trainer
from outputs import metrics_of


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2], ids="demo_seed_{}".format)
def test_the_tiny_run_learns(tmp_path, seed):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = run_trainer(
        "--config",
        "configs/tiny_arithmetic.yaml",
        f"output_dir={tmp_path}/run",
        f"seed={seed}",
        timeout=1200,
    )
    before, *_, after = metrics_of(tmp_path / "run")
    assert before["step"] == 0
    assert before["eval/mean@8"] < 0.70, "there must be something to learn"
    assert after["eval/greedy_accuracy"] >= 0.97
    assert after["eval/mean@8"] >= 0.95
    assert after["eval/format"] > before["eval/format"]
    for label in ("before", "after", "greedy accuracy", "mean@8", "pass@8", "format"):
        assert label in done.stdout
    folder = tmp_path / "run" / f"checkpoint-{after['step']}"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47+35="}], tokenize=False, add_generation_prompt=True
    )
    ids = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=64, do_sample=False)
    assert "<answer>82</answer>" in tokenizer.decode(ids[0])


@pytest.mark.slow
def test_the_calculator_is_learned_and_worth_it(tmp_path):
    """20 points of mean@4 more than the same training without the tool (measured: 83)."""
    after = {}
    for name, changes in (
        ("with", []),
        ("without", ["tools=[]", "eval.before_training=false"]),
    ):
        output = tmp_path / name
        # Half of the demo's steps and a fourth of its evaluation: the difference is many times its
        # error.
        few = ["optim.max_steps=50", "eval.max_samples=64", "eval.num_samples=4"]
        run_trainer(
            "--config",
            "configs/tiny_calculator.yaml",
            f"output_dir={output}",
            *few,
            *changes,
            timeout=1200,
        )
        first, *_, after[name] = metrics_of(output)
        if name == "with":
            assert first["eval/mean@4"] < 0.5
    assert after["with"]["eval/mean@4"] >= 0.9 > after["without"]["eval/mean@4"] + 0.2
    assert after["with"]["tools/call_frequency"] > 0.9
    assert after["with"]["tools/calculator/calls"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gsm8k_format_is_learned(tmp_path, assets, seed):
    run_trainer(
        "--config",
        "configs/gsm8k_cpu.yaml",
        f"model.name_or_path={assets}/models/gsm8k-7m",
        f"data.dataset={assets}/data/gsm8k/train.jsonl",
        f"output_dir={tmp_path}/run",
        f"seed={seed}",
        "eval.max_samples=16",
        "runtime.threads_per_rank=1",
        timeout=1800,
    )
    steps = [line for line in metrics_of(tmp_path / "run") if line["step"]]
    assert len(steps) == 30
    formats = [line["rewards/format/mean"] for line in steps]
    assert 0.4 < sum(formats[:3]) / 3 < 0.85, "where the checkpoint starts"
    assert sum(formats[-5:]) / 5 >= 0.95
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert steps[-1]["kl"] > 0

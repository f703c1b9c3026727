"""A published model of 135 million parameters learns to write dates.

``GRPO_TEST_REAL_MODEL`` is the folder of SmolLM2-135M-Instruct.
"""

import os
from statistics import fmean

import pytest
from conftest import load, run_trainer
from outputs import metrics_of

from grpo.algorithm.logprobs import CompletionScorer
from grpo.rollout import check_model

MODEL = os.environ.get("GRPO_TEST_REAL_MODEL")


@pytest.mark.slow
@pytest.mark.skipif(not MODEL, reason="needs GRPO_TEST_REAL_MODEL, SmolLM2-135M-Instruct's folder")
def test_ten_steps_of_a_real_model(tmp_path):
    """Three minutes on one core: greedy accuracy was 0.25 before and 0.84 after."""
    done = run_trainer(
        "--config",
        "configs/smollm2_135m.yaml",
        f"model.name_or_path={MODEL}",
        f"output_dir={tmp_path}/run",
        "optim.max_steps=10",
        "eval.max_samples=32",
        "eval.num_samples=1",
        "eval.temperature=0",
        timeout=1200,
    )
    assert "computes each prompt once per completion" not in done.stdout, "rows are packed"
    before, *_, after = metrics_of(tmp_path / "run")
    rewards = [line["reward"] for line in metrics_of(tmp_path / "run") if line["step"]]
    assert len(rewards) == 10
    assert fmean(rewards[-3:]) > fmean(rewards[:3])
    assert after["eval/greedy_accuracy"] > before["eval/greedy_accuracy"]

    policy = load(tmp_path / "run" / "checkpoint-10")
    assert check_model(policy, CompletionScorer(policy.model)) is None, "it can be sampled"

"""Runs in which nothing can be learnt, rewards misbehave, services go away or the clock does: they
go on, and say so."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, load, save_random_model, small_run
from harness import run
from outputs import assert_same_weights, lines, weights

from grpo.telemetry.samples import read_samples
from train_grpo import main


def inside(arguments) -> int:
    return main([*arguments, "runtime.threads_per_rank=1"])


def test_equal_groups_for_many_steps_move_nothing_but_weight_decay(capsys, tmp_path, random_model):
    """Adam's step is exactly 0; each matrix shrinks by the factor 1 - lr * decay a step, norms
    stay. The hint is given at the third step and at the end."""
    steps = 6
    lr = 1e-3
    decay = 0.1
    options = [
        f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:constant']", "algorithm.beta=0",
        f"optim.max_steps={steps}", f"optim.weight_decay={decay}", "eval.before_training=false",
        "data.max_eval_samples=1",
    ]  # fmt: skip
    assert inside([*small_run(random_model, tmp_path / "run"), *options]) == 0
    shown = capsys.readouterr().out
    equal = "all completions that have a reward have the same"
    # The advice stands in the hint, and not at the end again.
    assert shown.count(f"hint: {equal}. ") == shown.count(f"\nat end    {equal}\n") == 1
    assert shown.index("\nstep 3/") < shown.index(f"hint: {equal}") < shown.index("\nstep 4/")
    assert "entropy" not in shown
    for line in lines(tmp_path / "run"):
        for name in (
            "entropy",
            "ratio",
            "clip_ratio/region_mean",
            "sampling/logprob_difference",
        ):
            assert line[name] is None, name
        assert line["loss"] == 0.0
        assert line["grad_norm"] == 0.0
    after = weights(tmp_path / "run" / f"checkpoint-{steps}")
    for name, tensor in weights(random_model).items():
        expected = tensor.clone()
        for _ in range(steps if tensor.dim() >= 2 else 0):
            expected.mul_(1 - lr * decay)
        assert torch.equal(after[name], expected), name


def test_all_completions_truncated_and_masked(tmp_path):
    """Nothing is left to average over: the denominator is 1, the gradient 0."""
    options = [
        "rollout.max_completion_length=1", "algorithm.mask_truncated_completions=true", "optim.max_steps=2",
        "eval.before_training=false", "data.max_train_samples=8",
    ]  # fmt: skip
    model = with_logit_of_eos(-100.0, tmp_path / "model")
    assert inside([*small_run(model, tmp_path / "run"), *options]) == 0
    for line in lines(tmp_path / "run"):
        assert line["completions/clipped_ratio"] == 1.0
        assert line["grad_norm"] == 0.0
        assert line["skipped_updates"] == 0
        assert line["loss"] is None, "a mean of nothing"
    assert_same_weights(model, tmp_path / "run" / "checkpoint-2")


def test_empty_completions(tmp_path):
    """The first token is always EOS: one token each, text ''; rewards get it, the run goes on."""
    model = with_logit_of_eos(100.0, tmp_path / "model")
    assert (
        inside(
            [
                *small_run(model, tmp_path / "run"),
                "optim.max_steps=2",
                "logging.log_completions=100",
            ]
        )
        == 0
    )
    for line in lines(tmp_path / "run")[1:]:
        assert line["completions/max_length"] == 1.0
        assert line["completions/clipped_ratio"] == 0.0
        assert line["reward"] == 0.0
        assert line["frac_reward_zero_std"] == 1.0
    written = read_samples(tmp_path / "run" / "completions" / "step_000001.parquet")
    assert {row["completion"] for row in written} == {""}


def with_logit_of_eos(weight: float, folder: Path) -> Path:
    """The random model, whose logit of EOS has the sign of ``weight`` and is far from the others,
    which are 0."""
    model = load(save_random_model(folder)).model
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 50.0  # outweighs what the layers add
        model.lm_head.weight[model.config.eos_token_id, 0] = weight
    model.save_pretrained(folder)
    return folder


BAD_REWARDS = """
import os, sys, time

def value(text):
    return sum(c.isdigit() or c in "aeiou" for c in text) / max(len(text), 1)

def hangs_on_one(prompts, completions, **columns):
    if any(len(c) % 7 == 3 for c in completions):
        if len(completions) == 1:
            time.sleep(100)
        raise ValueError("one of them")
    return [value(c) for c in completions]

def kills_its_worker(prompts, completions, **columns):
    if any(len(c) % 5 == 2 for c in completions):
        os.kill(os.getpid(), 9)
    return [value(c) for c in completions]

def prints_megabytes(prompts, completions, **columns):
    for _ in range(300):
        sys.stdout.write("x" * 10_000 + chr(10))
    os.write(2, b"y" * 3_000_000)
    return [value(c) for c in completions]
"""


@pytest.mark.slow
def test_rewards_that_hang_kill_their_worker_and_print_megabytes(tmp_path, random_model):
    """All at once, on two ranks: the rows concerned score None and are counted; the others
    teach."""
    (tmp_path / "bad.py").write_text(BAD_REWARDS)
    names = ["hangs_on_one", "kills_its_worker", "prints_megabytes"]
    functions = ", ".join(f"'{tmp_path}/bad.py:{name}'" for name in names)
    output = tmp_path / "run"
    options = [
        f"reward.functions=[{functions}]", "reward.timeout_s=1", "optim.max_steps=2", "eval.before_training=false",
        "data.max_eval_samples=2",
    ]  # fmt: skip
    run(output, [*small_run(random_model, output), *options], ranks=2)
    for line in lines(output):
        assert 0 < line["rewards/hangs_on_one/errors"] < 24
        assert 0 < line["rewards/kills_its_worker/errors"] < 24
        assert line["rewards/prints_megabytes/errors"] == 0
        assert line["grad_norm"] > 0

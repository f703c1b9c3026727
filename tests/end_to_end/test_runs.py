"""Short real runs: resume without a trace, every preset, debug mode, rewards that fail."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, run_trainer, small_run
from safetensors.torch import load_file

PRESETS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "reinforce_baseline"]


def lines(output) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def without_times(line: dict) -> dict:
    return {k: v for k, v in line.items() if not k.startswith("time/") and k not in ("step_time", "tokens_per_second")}


def weights(output, step: int) -> dict[str, torch.Tensor]:
    return load_file(output / f"checkpoint-{step}" / "model.safetensors")


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, random_model, ranks):
    options = [
        "algorithm.beta=0.05", "algorithm.num_iterations=2", "algorithm.num_minibatches=2", "algorithm.ref_sync_steps=2",
        "algorithm.ref_sync_alpha=0.5", "optim.lr_scheduler_type=cosine", "optim.warmup_steps=3", "optim.max_steps=13",
        "checkpoint.save_steps=1", "checkpoint.keep=20", "data.max_train_samples=33", "rollout.prompts_per_step=6",
    ]  # fmt: skip
    whole = tmp_path / "run"
    arguments = [*small_run(random_model, whole), *options]
    run_trainer(*arguments, ranks=ranks)
    expected, expected_lines = weights(whole, 13), [without_times(line) for line in lines(whole)]
    assert expected_lines[4]["epoch"] < 1 < expected_lines[6]["epoch"], "the resumed part crosses an epoch"
    for step in range(5, 14):  # as if it had been killed in step 5
        shutil.rmtree(whole / f"checkpoint-{step}")
    done = run_trainer(*arguments, ranks=ranks)
    assert "resuming" in done.stdout
    resumed = weights(whole, 13)
    for name, tensor in expected.items():
        assert torch.equal(resumed[name], tensor), name
    assert [without_times(line) for line in lines(whole)] == expected_lines
    again = run_trainer(*arguments, ranks=ranks)
    assert "already complete" in again.stdout


@pytest.mark.slow
def test_changed_settings_are_refused_and_never_starts_afresh(tmp_path, random_model):
    arguments = [*small_run(random_model, tmp_path / "run"), "optim.max_steps=2", "checkpoint.save_steps=1"]
    run_trainer(*arguments)
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    changed = [*arguments, "algorithm.beta=0.5", "seed=9"]
    done = run_trainer(*changed, check=False)
    assert done.returncode == 2
    assert "algorithm.beta: checkpoint 0.04, now 0.5" in done.stderr
    assert "seed: checkpoint 0, now 9" in done.stderr
    done = run_trainer(*changed, "checkpoint.resume=never")
    assert "was moved to" in done.stdout
    assert (tmp_path / "run" / "previous-1" / "checkpoint-1").exists()
    assert lines(tmp_path / "run")[0]["step"] == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(tmp_path, random_model, preset):
    run_trainer(
        *small_run(random_model, tmp_path / "run"),
        f"algorithm.name={preset}",
        "optim.max_steps=2",
        "eval.before_training=false",
    )
    first, second = lines(tmp_path / "run")
    for line in (first, second):
        assert line["grad_norm"] > 0
        assert line["skipped_updates"] == 0
        assert ("kl" in line) == (preset == "grpo")
        assert ("rewards/soft_overlong/mean" in line) == (preset == "dapo")
    before = load_file(random_model / "model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "run", 2).items())


def test_equal_rewards_move_nothing(tmp_path, random_model):
    run_trainer(
        *small_run(random_model, tmp_path / "run"),
        f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:constant']",
        "algorithm.beta=0",
        "optim.max_steps=3",
    )
    assert [line["frac_reward_zero_std"] for line in lines(tmp_path / "run")[1:]] == [1.0, 1.0, 1.0]
    before = load_file(random_model / "model.safetensors")
    for name, tensor in weights(tmp_path / "run", 3).items():
        assert torch.equal(tensor, before[name]), f"{name} drifted without a reward to follow"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reward, said", [("raises", "failed on all"), ("wrong_length", "wrong_length")])
def test_a_broken_reward_stops_all_ranks_with_its_name(tmp_path, random_model, ranks, reward, said):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:{reward}']",
        "eval.before_training=false",
        ranks=ranks,
        timeout=90,
        check=False,
    )
    assert done.returncode not in (0, None)
    assert f"'{reward}'" in done.stderr
    assert said in done.stderr


def test_unscorable_completions_are_counted(tmp_path, random_model):
    run_trainer(
        *small_run(random_model, tmp_path / "run"),
        f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:unscorable']",
        "optim.max_steps=2",
        "eval.before_training=false",
    )
    for line in lines(tmp_path / "run"):
        assert 0 < line["frac_unscorable"] < 1
        assert line["reward"] == 1.0, "the mean of those that could be scored"
        assert line["frac_reward_zero_std"] == 1.0


def test_bf16_and_masking_and_minibatches(tmp_path, random_model):
    run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "runtime.precision=bf16",
        "algorithm.mask_truncated_completions=true",
        "algorithm.num_minibatches=3",
        "rollout.tokens_in_flight=200",
        "optim.max_steps=2",
    )
    line = lines(tmp_path / "run")[1]
    assert 0 < line["completions/clipped_ratio"] < 1
    assert 0 < line["sampling/logprob_difference"] < 0.1
    assert {tensor.dtype for tensor in weights(tmp_path / "run", 2).values()} == {torch.float32}


def test_debug_shows_and_checks(tmp_path, random_model):
    done = run_trainer(*small_run(random_model, tmp_path / "run"), "--debug")
    for text in (
        "sequence_ids_BS", "int64", "cpu", "rollout ", "completion 0:", "advantage ", "<|im_start|>user",
        "checked   masks = lengths, EOS inside the mask, all finite, KL = 0",
        "checked   importance ratio of the first update: 1.000000",
        "step 2/2",
    ):  # fmt: skip
        assert text in done.stdout
    assert not list((tmp_path / "run-debug").glob("checkpoint-*"))
    assert not (tmp_path / "run").exists()
    twice = run_trainer(*small_run(random_model, tmp_path / "run"), "--debug", ranks=2, check=False)
    assert twice.returncode != 0
    assert "--debug is single-process" in twice.stderr


def test_help_lists_every_key():
    from grpo.config import Config
    from grpo.config.arguments import keys_of

    text = run_trainer("--help").stdout
    for key, field in keys_of(Config).items():
        assert f"\n{key}  (" in text
        assert " ".join(field.description.split()) in text

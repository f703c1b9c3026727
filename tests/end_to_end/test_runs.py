"""Short real runs: every preset, debug mode, rewards that fail."""

import pytest
import torch
from conftest import ROOT, run_trainer, small_run
from outputs import lines, weights

from grpo.algorithm.advantages import weighted_sum
from grpo.config import PRESETS
from grpo.run.metrics import reward_metrics
from grpo.telemetry.records import json_safe


@pytest.mark.parametrize(
    "preset",
    [p if p == "dapo" else pytest.param(p, marks=pytest.mark.slow) for p in PRESETS],
)
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
    before = weights(random_model)
    after = weights(tmp_path / "run" / "checkpoint-2")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("raises", "RuntimeError: this reward is broken"),
        ("wrong_length", "returned 1 values for "),
    ],
)
def test_a_broken_reward_stops_all_ranks_with_its_name(tmp_path, random_model, reward, message):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:{reward}']",
        "eval.before_training=false",
        "data.max_eval_samples=1",
        ranks=2,
        timeout=90,
        check=False,
    )
    assert done.returncode not in (0, None)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors
    for error in errors:
        assert f"'{reward}'" in error
        assert message in error


def test_a_reward_that_gives_no_value_leaves_the_others_in_the_sum():
    nan = float("nan")
    values_PGF = torch.tensor([[[1.0, 2.0], [nan, 2.0], [1.0, nan], [nan, nan]]])
    rewards_PG = weighted_sum(values_PGF, [1.0, 0.5])
    torch.testing.assert_close(rewards_PG, torch.tensor([[2.0, 1.0, 1.0, nan]]), equal_nan=True)
    # A value without weight does not make a completion scored.
    rewards_PG = weighted_sum(values_PGF, [1.0, 0.0])
    torch.testing.assert_close(rewards_PG, torch.tensor([[1.0, nan, 1.0, nan]]), equal_nan=True)


def test_a_reward_that_scored_nothing_has_no_mean():
    nan = float("nan")
    values_PGF = torch.tensor([[[2e38, nan], [3e38, nan]], [[nan, nan], [1e38, nan]]])
    metrics = reward_metrics(["some", "none"], values_PGF, values_PGF[..., 0])
    assert metrics["rewards/some/mean"] == pytest.approx(2e38)
    assert metrics["rewards/some/std"] == pytest.approx(1e38)
    assert metrics["reward_std"] == pytest.approx(1e38), "of 1e38, 2e38 and 3e38, as in TRL"
    for name in ("rewards/none/mean", "rewards/none/std"):
        assert json_safe(metrics)[name] is None
    assert (
        json_safe(reward_metrics(["none"], values_PGF[..., 1:], values_PGF[..., 1]))["reward"]
        is None
    )


def test_debug_shows_and_checks(tmp_path, random_model):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"), "--debug", "eval.before_training=false"
    )
    for text in (
        "rollout.prompts_per_step: 2", "sequence_ids_BS", "int64", "cpu", "completion 0:", "advantage ", "<|im_start|>user",
        "checked   all values are finite\n",
        "\nratio of the first update: 1.000000\n",
        "\nkl of the first update: 0.000000\n",
        "step 2/2",
        "\ncolumns of its row: ",
    ):  # fmt: skip
        assert text in done.stdout
    assert not list((tmp_path / "run-debug").glob("checkpoint-*"))
    assert not (tmp_path / "run").exists()

"""MaxRL (``algorithm.scale=mean``) is defined for rewards of 0 and more: any other one ends the run."""

import math

import pytest
import torch
from conftest import ROOT, run_trainer, small_run

from grpo.algorithm.advantages import Scores
from grpo.run.step import check_not_negative


def test_a_negative_reward_is_named_with_its_step_and_its_parts():
    """A completion that no function could score counts as none; a function may be negative where the sum is not."""
    values_BF = torch.tensor([[1.0, -1.0], [0.0, math.nan], [math.nan, math.nan]])
    check_not_negative(Scores(values_BF, [1.0, 0.5]), ["right", "length"], step=7)
    values_BF[1] = torch.tensor([0.25, -1.0])
    with pytest.raises(
        ValueError, match=r"step 7: algorithm.scale=mean.*got -0.25 \(right 0.25 x 1, length -1 x 0.5\): change"
    ):
        check_not_negative(Scores(values_BF, [1.0, 0.5]), ["right", "length"], step=7)


def test_a_rounding_error_of_the_sum_is_no_negative_reward():
    values_BF = torch.tensor([[1.0, 3.0], [1.0, 3.0001], [1.0, 0.0]])
    rewards_B = Scores(values_BF, [0.9, -0.3]).rewards_PG
    assert rewards_B[0] == 0 and rewards_B[1] < -2e-5 and rewards_B[2] == torch.tensor(0.9)
    assert Scores(torch.tensor([[1e38, 2e38]]), [1.0, -1.0]).rewards_PG[0] < 0, "near the largest number of fp32"
    check_not_negative(Scores(values_BF[:1], [0.9, -0.3]), ["right", "length"], step=1)


@pytest.mark.slow
def test_a_run_ends_at_the_first_negative_reward(tmp_path, random_model):
    reward = f"reward.functions=[{{name: '{ROOT}/tests/rewards_for_tests.py:constant', weight: -1}}]"
    done = run_trainer(*small_run(random_model, tmp_path / "run"), "algorithm.name=maxrl", reward, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "step 1: algorithm.scale=mean" in line and "got -0.5 (constant 0.5 x -1)" in line

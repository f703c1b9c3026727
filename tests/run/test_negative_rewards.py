"""MaxRL (``algorithm.scale=mean``) is defined for rewards of 0 and more: any other one ends the
run."""

import pytest
import torch
from conftest import ROOT, run_trainer, small_run

from grpo.algorithm.advantages import group_advantages, weighted_sum


def test_a_rounding_error_of_the_sum_is_no_negative_reward():
    values_BF = torch.tensor([[1.0, 3.0], [1.0, 3.0001], [1.0, 0.0]])
    rewards_B = weighted_sum(values_BF, [0.9, -0.3])
    assert rewards_B[0] == 0 and rewards_B[1] < -2e-5 and rewards_B[2] == torch.tensor(0.9)
    assert weighted_sum(torch.tensor([[1e38, 2e38]]), [1.0, -1.0])[0] < 0, (
        "near the largest number of fp32"
    )
    group_advantages(rewards_B[None, ::2], scale="mean")
    with pytest.raises(ValueError, match="rewards must not be negative"):
        group_advantages(rewards_B[None], scale="mean")


@pytest.mark.slow
def test_a_run_ends_at_the_first_negative_reward(tmp_path, random_model):
    reward = (
        f"reward.functions=[{{name: '{ROOT}/tests/rewards_for_tests.py:constant', weight: -1}}]"
    )
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "algorithm.name=maxrl",
        reward,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        "algorithm.scale=mean" in line and "got -0.5: change the rewards or their weights" in line
    )

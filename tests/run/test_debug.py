"""What ``--debug`` checks and prints."""

import math

import pytest
from conftest import small_run

from grpo.config import load_config
from grpo.distributed import start_world
from grpo.run.debug import check_update
from grpo.run.prepare import prepare
from grpo.telemetry.accumulator import Accumulator


def test_the_first_update_begins_at_ratio_1_and_kl_0(capsys, tmp_path, random_model):
    config = load_config([*small_run(random_model, tmp_path / "run"), "--debug"])
    run = prepare(config, start_world(config.runtime))

    def check(ratio_sum, kl_sum):
        metrics = Accumulator()
        metrics.add("ratio", ratio_sum, 4)
        metrics.add("kl", kl_sum, 4)
        check_update(run.learner, metrics)

    check(4.0, 0.0)
    shown = capsys.readouterr().out
    assert shown.endswith("ratio of the first update: 1.000000\nkl of the first update: 0.000000\n")
    with pytest.raises(AssertionError, match=r"ratio of the first update: 1\.250000, not 1"):
        check(5.0, 0.0)
    with pytest.raises(AssertionError, match=r"kl of the first update: 0\.500000, not 0"):
        check(4.0, 2.0)

    # All advantages are 0: nothing was computed, and there is nothing to check.
    check(math.nan, math.nan)
    assert "ratio of the first update: nan: no advantages\n" in capsys.readouterr().out

    # From the second update on both may have any value.
    for parameter in run.learner.policy.model.parameters():
        parameter.grad = parameter.detach() * 0
    run.learner.optimizer.step()
    check(5.0, 2.0)
    run.close()

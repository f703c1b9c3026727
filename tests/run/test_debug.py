"""What ``--debug`` checks and prints."""

import pytest
from conftest import ROOT, small_run

from grpo.config import load_config
from grpo.distributed import start_world
from grpo.run.debug import check_update
from grpo.run.prepare import prepare
from grpo.telemetry.accumulator import Accumulator
from train_grpo import main


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
    assert "\nchecked   ratio of the first update: 1.000000\n" in shown
    assert "\nchecked   kl of the first update: 0.000000\n" in shown
    with pytest.raises(AssertionError, match=r"ratio of the first update: 1\.250000, not 1"):
        check(5.0, 0.0)
    with pytest.raises(AssertionError, match=r"kl of the first update: 0\.500000, not 0"):
        check(4.0, 2.0)

    # From the second update on both may have any value.
    for parameter in run.learner.policy.model.parameters():
        parameter.grad = parameter.detach() * 0
    run.learner.optimizer.step()
    check(5.0, 2.0)
    run.close()


def test_the_verdict_claims_no_check_that_was_not_made(capsys, tmp_path, random_model):
    """Equal rewards and no KL: no token counts in the update, so no importance ratio was computed."""
    constant = f"{ROOT}/tests/rewards_for_tests.py:constant"
    options = ["--debug", f"reward.functions=['{constant}']", "algorithm.beta=0"]
    assert main([*small_run(random_model, tmp_path / "run"), *options]) == 0
    shown = capsys.readouterr().out
    assert "\nunchecked ratio of the first update: nan, since no completion has an advantage\n" in shown
    assert "checked   ratio" not in shown
    assert "kl of the first update" not in shown
    assert "\nverdict   no check has failed\nsuspect   100% of the groups have equal rewards" in shown

"""The verdict of ``--debug``: the checks that were made, and what in the metrics would keep a run from learning."""

import pytest
from conftest import ROOT, small_run

from grpo.run.debug import suspicions
from grpo.telemetry.hints import Hints
from train_grpo import main

GOOD = {
    "reward": 0.5, "reward_std": 0.5, "frac_reward_zero_std": 0.5, "frac_unscorable": 0.0, "rewards/a/std": 0.5,
    "completions/clipped_ratio": 0.2,
}  # fmt: skip
SAME = {"frac_reward_zero_std": 1.0, "rewards/a/std": 0.0, "reward_std": 0.0}
NONE = {"reward": None, "reward_std": None, "frac_reward_zero_std": 1.0, "frac_unscorable": 1.0, "rewards/a/std": None}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([GOOD, GOOD], []),
        ([GOOD, GOOD | SAME | {"reward": 1.0}], []),
        ([GOOD | SAME | {"reward": 0.0}] * 2, ["every completion got reward 0: "]),
        ([GOOD | SAME | {"reward": 0.25}] * 2, ["every completion got reward 0.25: "]),
        ([GOOD | SAME | {"reward": 0.0}, GOOD | SAME | {"reward": 1.0}], ["100% of the groups have equal rewards"]),
        ([GOOD | {"frac_reward_zero_std": 1.0}] * 2, ["100% of the groups have equal rewards"]),
        ([GOOD | NONE] * 2, ["no completion of the last steps has a score"]),
        ([GOOD | {"completions/clipped_ratio": 0.3}] * 2, ["30% of the completions are cut off"]),
        ([GOOD | {"completions/clipped_ratio": 1.0}] * 2, ["(--debug lowers the limit, here to 64)"]),
        ([GOOD | {"time/frac_core_wait": 0.5}] * 2, []),
        ([GOOD | {"tools/call_frequency": 0.0}] * 2, ["nobody called the tool"]),
    ],
)  # fmt: skip
def test_what_would_keep_a_run_from_learning(steps, words):
    hints = Hints()
    for step in steps:
        hints.update(step)
    found = list(suspicions(steps, hints.verdict(), 64))
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text


def test_the_verdict_lists_the_checks_that_were_made(capsys, tmp_path, random_model):
    """Equal rewards and no KL: no token counts in the update, so no importance ratio was computed."""
    options = ["--debug", f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:constant']", "algorithm.beta=0"]
    assert main([*small_run(random_model, tmp_path / "run"), *options]) == 0
    shown = capsys.readouterr().out
    assert "\nunchecked importance ratio of the first update: no completion has an advantage\n" in shown
    (verdict,) = [line for line in shown.splitlines() if line.startswith("checked   all checks")]
    assert "masks = lengths" in verdict and "all finite" in verdict
    assert "importance ratio" not in verdict and "KL" not in verdict
    assert "\nsuspect   every completion got reward 0.5: " in shown
    assert "entropy" not in shown and "100% of the groups" not in shown

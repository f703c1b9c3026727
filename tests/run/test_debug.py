"""The verdict of ``--debug``: what in the metrics of the steps would keep a run from learning."""

import pytest

from grpo.config import Config
from grpo.run.debug import suspicions

GOOD = {
    "reward": 0.5, "reward_std": 0.5, "frac_reward_zero_std": 0.5, "frac_unscorable": 0.0, "rewards/a/std": 0.5,
    "completions/clipped_ratio": 0.9,
}  # fmt: skip
SAME = {"frac_reward_zero_std": 1.0, "rewards/a/std": 0.0, "reward_std": 0.0}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([GOOD, GOOD], []),
        ([GOOD, GOOD | SAME | {"reward": 1.0}], []),
        ([GOOD | SAME | {"reward": 0.0}] * 2, ["every completion got reward 0: "]),
        ([GOOD | SAME | {"reward": 0.25}] * 2, ["every completion got reward 0.25: "]),
        ([GOOD | SAME | {"reward": 0.0}, GOOD | SAME | {"reward": 1.0}], ["equal rewards"]),
        ([GOOD | {"frac_reward_zero_std": 1.0}] * 2, ["equal rewards"]),
        ([GOOD | {"reward": None, "frac_unscorable": 1.0, "rewards/a/std": None}] * 2, ["no completion got a reward"]),
        ([GOOD | {"completions/clipped_ratio": 1.0}] * 2, ["cut off at rollout.max_completion_length=64"]),
    ],
)  # fmt: skip
def test_what_would_keep_a_run_from_learning(steps, words):
    found = list(suspicions(steps, Config(rollout={"max_completion_length": 64})))
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text

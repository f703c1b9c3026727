"""What a run that continues must have in common with its checkpoint."""

from contextlib import closing

import pytest

from grpo.checkpoint.resume import _differences, content_digests
from grpo.config import make_config
from grpo.rewards import RewardRunner


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"seed": 5}, {"seed": 5, "eval.every": 2}, []),
        # More steps of a constant rate are the same training; a schedule follows from their number.
        ({"optim.max_steps": 2}, {"optim.max_steps": 4}, []),
        (
            {"optim.max_steps": 2, "optim.lr_scheduler_type": "linear"},
            {"optim.max_steps": 4, "optim.lr_scheduler_type": "linear"},
            [("optim.max_steps", 2, 4)],
        ),
        (
            {"optim.num_epochs": 2, "optim.warmup_steps": 0.1},
            {"optim.num_epochs": 3, "optim.warmup_steps": 0.1},
            [("optim.num_epochs", 2.0, 3.0)],
        ),
        # How a batch is cut changes rounding alone; remote code can compute another function.
        (
            {},
            {
                "optim.tokens_per_microbatch": 99,
                "rollout.tokens_in_flight": 99,
                "model.trust_remote_code": True,
            },
            [("model.trust_remote_code", False, True)],
        ),
        # The value of a key may be a mapping.
        (
            {},
            {"data.chat_template_kwargs": {"a": 1}},
            [("data.chat_template_kwargs", {}, {"a": 1})],
        ),
    ],
)
def test_settings_that_differ(before, now, expected):
    state = {"config": make_config(before).values_to_save(), "content": {}}
    assert _differences(make_config(now), state, {}) == expected


def test_files_and_rows_that_differ_and_a_key_that_is_new():
    written = make_config({}).values_to_save()
    del written["algorithm"]["scale"]
    state = {"config": written, "content": {"r.py": "b", "gone.py": "c", "same": "d"}}
    assert _differences(make_config({}), state, {"r.py": "e", "new.py": "f", "same": "d"}) == [
        ("algorithm.scale", "missing", "group"),
        ("content of gone.py", "c", "not read"),
        ("content of new.py", "not read", "f"),
        ("content of r.py", "b", "e"),
    ]


def test_a_reference_of_the_models_name_does_not_hide_the_models_files(random_model):
    """Without a KL term, the reference has no path."""
    settings = {"model.name_or_path": str(random_model), "algorithm.beta": 0.0}
    with closing(RewardRunner([], timeout_s=1)) as rewards:
        digests = [
            content_digests(make_config(settings | reference), random_model, rewards, None, {}, {})
            for reference in ({}, {"model.reference": str(random_model)})
        ]
    assert digests[0] == digests[1] != {}

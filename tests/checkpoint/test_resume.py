"""What a run that continues must have in common with its checkpoint."""

from grpo.checkpoint.resume import _differences
from grpo.config import make_config


def test_differences_are_settings_data_and_files():
    config = make_config({"optim.max_steps": 4, "rollout.tokens_in_flight": 99, "eval.every": 2, "seed": 5})
    before = make_config({"optim.max_steps": 2, "seed": 5})
    saved = {"config": before.for_writing(), "data_fingerprint": "a", "content": {"r.py": "b", "gone.py": "c"}}
    assert _differences(config, saved, "d", {"r.py": "e", "new.py": "f"}) == [
        ("rows of data.dataset", "a", "d"),
        ("content of gone.py", "c", "missing"),
        ("content of new.py", "missing", "f"),
        ("content of r.py", "b", "e"),
        ("optim.max_steps", 2, 4),
    ]


def test_limits_of_memory_may_change_and_code_of_the_model_may_not():
    """How a batch is cut changes rounding alone; remote code can compute another function."""
    limits = {
        "optim.tokens_per_microbatch": 99,
        "rollout.tokens_in_flight": 99,
        "model.gradient_checkpointing": True,
    }
    before = {"config": make_config({}).for_writing(), "data_fingerprint": "a", "content": {}}
    now = make_config(limits | {"model.trust_remote_code": True})
    assert _differences(now, before, "a", {}) == [("model.trust_remote_code", False, True)]


def test_a_key_that_the_version_of_the_checkpoint_did_not_have_had_its_default():
    written = make_config({}).for_writing()
    del written["algorithm"]["scale"]
    before = {"config": written, "data_fingerprint": "a", "content": {}}
    assert _differences(make_config({}), before, "a", {}) == []
    changed = make_config({"algorithm.scale": "none"})
    assert _differences(changed, before, "a", {}) == [("algorithm.scale", "group", "none")]


def test_the_value_of_a_key_may_be_a_mapping():
    rest = {"data_fingerprint": "a", "content": {}}
    without = make_config({})
    thinking = make_config({"data.chat_template_kwargs": {"enable_thinking": False}})
    key = "data.chat_template_kwargs"
    for before, now in ((without, thinking), (thinking, without)):
        kwargs = [config.data.chat_template_kwargs for config in (before, now)]
        assert _differences(now, {"config": before.for_writing(), **rest}, "a", {}) == [(key, *kwargs)]

"""What a run that continues must have in common with its checkpoint."""

from grpo.checkpoint.resume import _differences
from grpo.config import make_config


def test_differences_are_settings_data_and_files():
    config = make_config({"optim.max_steps": 4, "rollout.tokens_in_flight": 99, "eval.every": 2, "seed": 5})
    before = make_config({"optim.max_steps": 2, "seed": 5})
    saved = {"config": before.for_writing(), "data_fingerprint": "a", "content": {"r.py": "b", "gone.py": "c"}}
    saved |= {"tokens_per_microbatch": None, "tokens_in_flight": 99}  # which the run has chosen
    assert _differences(config, saved, "d", {"r.py": "e", "new.py": "f"}) == [
        ("rows of data.dataset", "a", "d"),
        ("content of gone.py", "c", "missing"),
        ("content of new.py", "missing", "f"),
        ("content of r.py", "b", "e"),
        ("optim.max_steps", 2, 4),
    ]


def test_the_value_of_a_key_may_be_a_mapping():
    rest = {"data_fingerprint": "a", "content": {}, "tokens_per_microbatch": None, "tokens_in_flight": None}
    without = make_config({})
    thinking = make_config({"data.chat_template_kwargs": {"enable_thinking": False}})
    key = "data.chat_template_kwargs"
    for before, now in ((without, thinking), (thinking, without)):
        kwargs = [config.data.chat_template_kwargs for config in (before, now)]
        assert _differences(now, {"config": before.for_writing(), **rest}, "a", {}) == [(key, *kwargs)]

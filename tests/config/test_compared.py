"""Where the value of each key may differ, and the settings that are compared."""

from grpo.config import Config, flat, keys_of, make_config, settings_except, settings_of_all_ranks
from grpo.config.compared import MAY_DIFFER


def test_what_may_differ_are_keys():
    """A new key is compared everywhere, until grpo/config/compared.py says that its value may
    differ."""
    known = keys_of(Config)
    sections = {key.partition(".")[0] for key in known}
    for mark, names in MAY_DIFFER.items():
        assert set(names.split()) <= known.keys() | sections
        assert {"seed", "optim.learning_rate", "algorithm.beta"} <= settings_except(
            mark, Config()
        ).keys()
    continued = settings_except("may change when a run continues", Config())
    assert "rollout.engine" in continued
    assert not {"rollout.server", "eval.every", "output_dir"} & continued.keys()


def test_ranks_share_settings_except_no_folders():
    """Two machines with folders of their own, and the same functions in files of the same name."""

    def on(machine, **changes):
        values = {
            "output_dir": f"/{machine}/run",
            "model.name_or_path": f"/{machine}/model",
            "runtime.threads_per_rank": len(machine),
            "algorithm.objective": f"/{machine}/mine.py:loss",
            "algorithm.advantages": f"/{machine}/mine.py:advantages",
            "reward.functions": [{"name": f"/{machine}/mine.py:score", "weight": 0.5}],
        }
        return settings_of_all_ranks(make_config(values | changes))

    shared = on("a")
    assert shared == on("bb")
    assert shared["reward.functions"] == [{"name": "mine.py:score", "weight": 0.5, "args": {}}]
    for key, value in {"seed": 1, "logging.every": 2, "algorithm.advantages": "mine.py:g"}.items():
        changed = on("a", **{key: value})
        assert [name for name in shared if shared[name] != changed[name]] == [key]


def test_values_by_key():
    """A mapping that is the value of a key is one value. Keys that no longer exist are kept too."""
    mapping = {"a": {"b": 2}}
    values = {"seed": 1, "data": {"chat_template_kwargs": mapping, "gone": {"c": 3}}}
    assert flat(values) == {"seed": 1, "data.chat_template_kwargs": mapping, "data.gone.c": 3}

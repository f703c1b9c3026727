"""``config.yaml`` of a run as the configuration of the next: what was implied follows anew, what
was set stays."""

import json
from pathlib import Path

import pytest
import yaml

from grpo.checkpoint.resume import Lock, start_output
from grpo.config import ConfigError, config_of_models, keys_without_effect, load_config, make_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def saved(tmp_path):
    """Writes the file of a run with this configuration, as its start does."""

    def save(config, name="run"):
        lock = Lock()
        folder = tmp_path / name
        start_output(make_config(config, {"output_dir": str(folder)}), None, lock)
        lock.release()
        return folder / "config.yaml"

    return save


def reloaded(file, *overrides):
    return load_config(["--config", str(file), *overrides])


@pytest.mark.parametrize("path", [*CONFIGS, "--debug"], ids=str)
def test_a_saved_configuration_gives_the_same_values(saved, path):
    argv = ["--config", str(path)]
    if path == "--debug":
        argv = [
            "--debug",
            "algorithm.name=dapo",
            "algorithm.num_minibatches=4",
            "rollout.prompts_per_step=64",
        ]
    config = load_config(argv)
    first = saved(config)
    second = saved(make_config(first), "second")
    for file in (first, second):
        again = reloaded(file, f"output_dir={config.output_dir}")
        assert again.values_to_save() == config.values_to_save() | {
            "given": again.values_to_save()["given"]
        }
        assert again == make_config(
            yaml.safe_load(file.read_text()), {"output_dir": config.output_dir}
        )
    assert keys_without_effect(reloaded(first)) == keys_without_effect(config)


def test_another_preset_brings_its_values(saved):
    expected = make_config({"algorithm.name": "dr_grpo"}).algorithm
    file = saved(make_config({"algorithm.name": "gspo", "optim.learning_rate": 1e-5}))
    config = reloaded(file, "algorithm.name=dr_grpo")
    assert config.algorithm == expected and config.optim.learning_rate == 1e-5
    assert (
        make_config(
            make_config({"algorithm.name": "gspo"}), {"algorithm.name": "dr_grpo"}
        ).algorithm
        == expected
    )
    # A value that is set stays.
    kept = saved(make_config({"algorithm.scale": "group"}), "kept")
    assert reloaded(kept, "algorithm.name=dr_grpo").algorithm.scale == "group"


def test_what_was_implied_follows(saved):
    values = {
        "algorithm.name": "dapo",
        "rollout.engine": "vllm",
        "reward.functions": ["accuracy", "format"],
    }
    file = saved(make_config(values))
    *_, overlong = reloaded(file, "rollout.max_completion_length=200").reward.functions
    assert overlong.args == {"max_length": 200, "cache_length": 40}
    config = reloaded(file, "algorithm.name=grpo", "rollout.engine=builtin")
    assert [function.name for function in config.reward.functions] == ["accuracy", "format"]
    assert config.algorithm.sampler_correction == "none"


def test_a_value_that_was_changed_in_one_of_both_places_is_refused(saved):
    """Else the change would have no effect, or pin what a preset implied."""
    file = saved(make_config({"optim.learning_rate": 1e-5}))
    values = yaml.safe_load(file.read_text())
    assert make_config({"given": values["given"]}) == make_config(values) == reloaded(file)
    with pytest.raises(ConfigError, match="the entry `given`: change both"):
        make_config(values | {"optim.learning_rate": 3e-5})
    values["rollout"]["temperature"] = 0.9
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="the entry `given`: change both"):
        reloaded(file)
    del values["given"]
    assert make_config(values).rollout.temperature == 0.9, "without the entry, all values were set"


def test_arguments_of_rewards_keep_their_types():
    arguments = {"weights": {1: 0.5}, "bounds": (0, 1)}
    config = make_config({"reward.functions": [{"name": "a.py:f", "args": arguments}]})
    assert make_config(config, {"seed": 1}).reward.functions[0].args == arguments


def test_secrets_are_masked_and_texts_do_not_depend_on_files(saved, tmp_path):
    prompt = tmp_path / "system.txt"
    prompt.write_text("Answer.")
    functions = [{"name": "judge.py:score", "args": {"api_key": "s3cret"}}]
    file = saved(make_config({"data.system_prompt": str(prompt), "reward.functions": functions}))
    prompt.unlink()
    assert "s3cret" not in file.read_text()
    config = reloaded(file)
    assert config.data.system_prompt == "Answer." and config.reward.functions[0].args == {
        "api_key": "***"
    }


def test_commands_read_it_of_a_run_and_of_a_checkpoint_that_was_copied(saved, tmp_path):
    config = make_config({"algorithm.name": "dapo", "rollout.max_completion_length": 20})
    file = saved(config)
    state_file = tmp_path / "elsewhere" / "best" / "trainer" / "state.json"
    state_file.parent.mkdir(parents=True)
    state_file.write_text(json.dumps({"config": config.values_to_save()}))
    for model, expected in ((file.parent, file), (tmp_path / "elsewhere" / "best", state_file)):
        found, source = config_of_models([str(model)], None, ["rollout.max_completion_length=200"])
        assert found.reward.functions[-1].args["max_length"] == 200
        assert source == expected

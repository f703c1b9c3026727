"""``config.yaml`` of a run as the configuration of the next: what was implied follows anew, what was set stays."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from grpo.checkpoint.resume import Lock, _differences, start_output
from grpo.config import PRESETS, ConfigError, config_of_models, keys_without_effect, load_config, make_config
from grpo.report.read import read_run

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


def edit(file, change):
    values = yaml.safe_load(file.read_text())
    change(values)
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


@pytest.mark.parametrize("name", [*PRESETS, *(path.name for path in CONFIGS), "--debug"])
def test_a_saved_configuration_gives_the_same_values(saved, name):
    argv = [f"algorithm.name={name}", "reward.functions=[format]", "optim.betas=[0.9, 0.95]"]
    if name.endswith(".yaml"):
        argv = ["--config", str(CONFIGS[0].parent / name)]
    elif name == "--debug":
        argv = ["--debug", "algorithm.name=dapo", "algorithm.num_minibatches=4", "rollout.prompts_per_step=64"]
    first = saved(load_config(argv))
    second = saved(make_config(first), "second")
    values = []
    for file in (first, second):
        config = reloaded(file, "output_dir=x")
        values.append(config.for_writing())
        assert config == make_config(file, {"output_dir": "x"})
        assert config == make_config(yaml.safe_load(file.read_text()), {"output_dir": "x"})
        written = yaml.safe_load(file.read_text())
        given = written.pop("given")
        assert written | {"output_dir": "x"} == config.for_writing()
        assert given | {"output_dir": "x"} == config.for_saving()["given"]
    assert values[0] == values[1]
    assert keys_without_effect(reloaded(first)) == keys_without_effect(load_config(argv))


def test_another_preset_brings_its_values(saved):
    file = saved(make_config({"optim.learning_rate": 1e-5}))
    a = reloaded(file, "algorithm.name=dr_grpo").algorithm
    assert a == make_config({"algorithm.name": "dr_grpo"}).algorithm
    assert reloaded(file, "algorithm.name=dr_grpo").optim.learning_rate == 1e-5
    # A value that is set stays, also where the old preset had it.
    assert reloaded(file, "algorithm.name=dr_grpo", "algorithm.scale=group").algorithm.scale == "group"
    kept = saved(make_config({"algorithm.scale": "group"}), "kept")
    assert reloaded(kept, "algorithm.name=dr_grpo").algorithm.scale == "group"
    # From Python, too.
    assert make_config(make_config({"algorithm.name": "gspo"}), {"algorithm.name": "dr_grpo"}).algorithm == a


@pytest.mark.parametrize("functions", [None, ["accuracy"], [{"name": "accuracy", "weight": 2.0}, "format"]])
def test_an_implied_reward_follows(saved, functions):
    values = {"algorithm.name": "dapo", "rollout.max_completion_length": 20}
    if functions is not None:
        values["reward.functions"] = functions
    file = saved(make_config(values))
    *others, overlong = reloaded(file, "rollout.max_completion_length=200").reward.functions
    assert overlong.args == {"max_length": 200, "cache_length": 40} and len(others) == len(functions or [1])
    names = [function.name for function in reloaded(file, "algorithm.name=grpo").reward.functions]
    assert "soft_overlong" not in names
    own = {"reward.functions": ["accuracy", {"name": "soft_overlong", "args": {"max_length": 9, "cache_length": 3}}]}
    file = saved(make_config(values | own), "own")
    assert reloaded(file, "rollout.max_completion_length=200").reward.functions[-1].args["max_length"] == 9


def test_what_the_engine_implies_goes_with_it(saved):
    file = saved(make_config({"rollout.engine": "vllm"}))
    assert reloaded(file).algorithm.sampler_correction == "token_truncate"
    assert reloaded(file, "rollout.engine=builtin").algorithm.sampler_correction == "none"


def test_values_that_were_changed_by_hand_count(saved):
    file = saved(make_config({"algorithm.name": "dapo", "optim.learning_rate": 1e-5, "environment": {"a": "a.py:A"}}))

    def change(values):
        values["optim"]["learning_rate"] = 2e-5
        values["rollout"]["temperature"] = 0.9
        values["rollout"]["max_completion_length"] = 300
        values["seed"] = 7
        values["environment"] = {"b": "b.py:B"}
        del values["eval"]

    edited = yaml.safe_load(edit(file, change).read_text())
    before = copy.deepcopy(edited)
    config = reloaded(file)
    assert make_config(edited) == config and edited == before
    assert (config.optim.learning_rate, config.rollout.temperature, config.seed) == (2e-5, 0.9, 7)
    assert config.environment == {"b": "b.py:B"} and "seed" in config.model_fields_set
    a = reloaded(edit(file, change_name), "seed=8").algorithm
    assert a == make_config({"algorithm.name": "dr_grpo"}).algorithm
    with pytest.raises(ConfigError, match=r"did you mean 'rollout\.temperature'"):
        reloaded(edit(file, lambda values: values["rollout"].update(temprature=0.9)))


def test_no_value_is_lost_where_only_one_of_both_places_has_it(saved):
    file = saved(make_config({"optim.learning_rate": 1e-5, "optim.max_steps": 7}))
    values = yaml.safe_load(file.read_text())
    # Keys with dots beside the entry, as a program may add them.
    optim = make_config(values | {"optim.learning_rate": 3e-5}).optim
    assert (optim.learning_rate, optim.max_steps) == (3e-5, 7)
    # The entry alone is a whole configuration.
    assert make_config({"given": values["given"]}) == make_config(values)
    edit(file, lambda values: values["optim"].pop("max_steps"))
    with pytest.raises(ConfigError, match=r"optim\.max_steps is in `given` alone: remove it there too"):
        reloaded(file)
    edit(file, lambda values: values["given"]["optim"].pop("max_steps"))
    assert reloaded(file).optim.max_steps is None and reloaded(file).optim.learning_rate == 1e-5


def test_arguments_of_rewards_keep_their_types():
    arguments = {"weights": {1: 0.5}, "bounds": (0, 1)}
    config = make_config({"reward.functions": [{"name": "a.py:f", "args": arguments}]})
    assert make_config(config, {"seed": 1}).reward.functions[0].args == arguments
    overrides = ["reward.functions=[{name: a.py:f, args: {weights: {1: 0.5}}}]", "--debug"]
    assert load_config(overrides).reward.functions[0].args == {"weights": {1: 0.5}}


def change_name(values):
    values["algorithm"]["name"] = "dr_grpo"
    values.setdefault("eval", {})


def test_files_of_before_are_read_as_they_were(saved):
    file = edit(saved(make_config({})), lambda values: values.pop("given"))
    a = reloaded(file, "algorithm.name=dr_grpo").algorithm
    assert (a.name, a.scale, a.beta) == ("dr_grpo", "group", 0.04)


def test_secrets_are_masked_and_texts_do_not_depend_on_files(saved, tmp_path):
    prompt = tmp_path / "system.txt"
    prompt.write_text("Answer.")
    functions = [{"name": "judge.py:score", "args": {"api_key": "s3cret"}}]
    file = saved(make_config({"data.system_prompt": str(prompt), "reward.functions": functions}))
    prompt.unlink()
    assert "s3cret" not in file.read_text()
    config = reloaded(file)
    assert config.data.system_prompt == "Answer." and config.reward.functions[0].args == {"api_key": "***"}
    with_key = edit(file, lambda values: values["reward"]["functions"][0]["args"].update(api_key="new"))
    assert reloaded(with_key).reward.functions[0].args == {"api_key": "new"}


def test_other_readers_of_saved_configurations(saved):
    config = make_config({"algorithm.name": "dapo", "rollout.max_completion_length": 20})
    file = saved(config)
    assert read_run(file.parent).config["algorithm.name"] == "dapo"
    assert not [key for key in read_run(file.parent).config if key.startswith("given")]
    assert file.read_text().count("\n# What was set.") == 1

    state = {"config": config.for_saving(), "data_fingerprint": "", "content": {}}
    assert _differences(config, state, "", {}) == []
    checkpoint = file.parent / "checkpoint-3"
    (checkpoint / "trainer").mkdir(parents=True)
    (checkpoint / "trainer" / "state.json").write_text(json.dumps(state))
    for model in (checkpoint, file.parent):
        found, _ = config_of_models([str(model)], None, ["rollout.max_completion_length=200"])
        assert found.reward.functions[-1].args["max_length"] == 200
        assert found.output_dir == str(file.parent)

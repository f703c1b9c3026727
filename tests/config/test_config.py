"""Configuration: where a value comes from, what each preset means, and one clear line for each mistake."""

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import train_grpo
from grpo.algorithm.loss import policy_loss
from grpo.config import PRESETS, Config, ConfigError, check_world_size, help_text, keys_of, load_config, make_config
from grpo.config.aliases import ALIASES, EXPLANATIONS
from grpo.config.config import add_implied_rewards
from grpo.config.fit_ranks import fitting_ranks


@pytest.fixture
def file(tmp_path):
    """Writes YAML text and returns the arguments that load it."""

    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return ["--config", str(path)]

    return write


def value_at(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def mistakes(argv):
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value).splitlines()


# --- where a value comes from


def test_defaults_then_file_then_overrides_then_later_overrides(file):
    argv = file("rollout: {top_k: 5, temperature: 0.5, num_generations: 16}\nseed: 1\n")
    config = load_config([*argv, "rollout.temperature=0.7", "seed=2", "seed=3"])
    assert config.rollout.prompts_per_step == 8  # default
    assert (config.rollout.top_k, config.rollout.num_generations) == (5, 16)  # file
    assert config.rollout.temperature == 0.7  # override
    assert config.seed == 3  # later override
    assert load_config(["seed=4", *argv]).seed == 4  # wherever the override stands


def test_no_arguments_and_an_empty_file_are_the_defaults(file):
    assert load_config([]) == Config() == load_config(file("")) == load_config(file("rollout:\nseed: 0\n"))


def test_the_default_file_is_read_and_named_if_there_is_no_other(file, capsys, monkeypatch):
    _, default = file("seed: 5\n", "default.yaml")
    assert load_config(["rollout.top_k=3"], default_file=default).seed == 5
    assert capsys.readouterr().out.endswith("/default.yaml, since there is no --config\n")
    assert load_config(file("rollout: {top_k: 3}\n"), default_file=default).seed == 0
    monkeypatch.setenv("RANK", "1")
    assert load_config([], default_file=default).seed == 5
    assert capsys.readouterr().out == "", "said by the first rank only"


def test_the_trainer_without_config_runs_the_demo(capsys):
    """``eval.num_samples`` is 8 in the demo and 1 by default, so that this is a mistake in the demo alone."""
    assert train_grpo.main(["eval.temperature=0"]) == 2
    output = capsys.readouterr()
    assert output.out.startswith("config    ")
    assert "configs/tiny_arithmetic.yaml" in output.out
    assert "eval.num_samples=8 at eval.temperature=0" in output.err
    assert load_config([], default_file=train_grpo.DEMO) == load_config(["--config", str(train_grpo.DEMO)])


def test_overrides_are_read_as_yaml():
    config = load_config([
        "rollout.stop=[\"\\n\", 'Q:']",
        "reward.functions=[accuracy, {name: format, weight: 0.5, args: {tag: think}}]",
        "data.few_shot=[{prompt: '2+2', completion: '4'}]",
        "optim.betas=[0.9, 0.95]",
        "data.config_name=null",
        "eval={num_samples: 4, temperature: 1.0}",
        "eval.max_samples=7",
        "data.train_split=train[:90%]",
        "runtime.deterministic=true",
    ])  # fmt: skip
    assert config.rollout.stop == ["\n", "Q:"]
    assert [(f.name, f.weight, f.args) for f in config.reward.functions] == [
        ("accuracy", 1.0, {}),
        ("format", 0.5, {"tag": "think"}),
    ]
    assert config.data.few_shot == [{"prompt": "2+2", "completion": "4"}]
    assert config.optim.betas == (0.9, 0.95)
    assert config.data.config_name is None and config.data.train_split == "train[:90%]"
    assert (config.eval.num_samples, config.eval.max_samples) == (4, 7)
    assert config.runtime.deterministic is True


def test_none_is_read_as_the_help_writes_it(file):
    """Where a key can be unset; ``algorithm.scale`` has a choice of that name."""
    unset = ["eval.max_samples=none", "algorithm.delta=none", "data.eval_split=none", "rollout.prompts_per_rank=none"]
    config = load_config(["rollout.prompts_per_step=4", *unset, "algorithm.scale=none"])
    assert (config.eval.max_samples, config.algorithm.delta, config.data.eval_split) == (None, None, None)
    assert (config.algorithm.scale, config.rollout.prompts_per_step) == ("none", 4)
    per_step = file("rollout: {prompts_per_step: 6}\neval: {max_samples: none}")
    config = load_config([*per_step, "rollout.prompts_per_rank=none"])
    assert (config.eval.max_samples, config.rollout.prompts_per_step) == (None, 6)
    with pytest.raises(ValueError, match=r"rollout\.top_k='none': input should be a valid integer"):
        load_config(["rollout.top_k=none"])


@pytest.mark.parametrize("text", ["Question: {prompt}", "{prompt}", "{prompt}: {level}"])
def test_a_template_needs_no_quotes_of_yaml(text):
    assert load_config([f"data.question_template={text}"]).data.question_template == text
    assert load_config([f"data.question_template='{text}'"]).data.question_template == text


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", "+1e-6", "1_0e-7"])
def test_scientific_notation_is_a_number(file, text):
    functions = (
        f"[{{name: accuracy, args: {{value: {text}}}}}]"  # no declared type that would turn a string into a number
    )
    for argv in (
        [f"optim.learning_rate={text}", f"reward.functions={functions}"],
        file(f"optim: {{learning_rate: {text}}}\nreward: {{functions: {functions}}}\n"),
    ):
        config = load_config(argv)
        assert config.optim.learning_rate == 1e-6
        assert config.reward.functions[0].args == {"value": 1e-6}


def test_a_number_sign_in_an_override_is_not_a_comment():
    assert load_config(["data.answer_pattern=#### (.+)"]).data.answer_pattern == "#### (.+)"
    assert (
        load_config(["data.system_prompt=End with #### and a number"]).data.system_prompt
        == "End with #### and a number"
    )
    assert load_config(["data.answer_pattern='#### (.+)'"]).data.answer_pattern == "#### (.+)"


MANY_LAUGHS = "a0: &a0 [ha]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
HOSTILE = {
    "aliases of aliases": (
        MANY_LAUGHS,
        ":7: not valid YAML: more than 1,000,000 characters when its aliases are replaced",
    ),
    "an alias of itself": ("seed: &a [*a]", ":1: not valid YAML: an alias stands for something that contains it"),
    "nested deeply": ("[" * 900 + "]" * 900, ": not valid YAML: nested too deeply"),
    "a long file": ("#" * 1_000_001, " cannot be read: it has more than 1,000,000 characters"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_yaml_is_refused_in_one_line(file, case):
    text, problem = HOSTILE[case]
    (mistake,) = mistakes(file(text))
    assert mistake.endswith(problem)


def test_an_endless_file_is_no_configuration():
    (mistake,) = mistakes(["--config", "/dev/zero"])
    assert mistake == "config file /dev/zero cannot be read: it has more than 1,000,000 characters"
    (mistake,) = mistakes(["seed=" + "[" * 900])
    assert mistake == "seed=: not valid YAML: nested too deeply"


def test_yaml_anchors_and_merges_work(file):
    argv = file("rollout: &sampling {temperature: 0.5}\neval:\n  <<: *sampling\n  num_samples: 4\n")
    assert load_config(argv).eval.temperature == 0.5


# --- presets


PRESET_TABLE = {  # objective, baseline, scale, aggregation, level, epsilon low and high, beta, dynamic sampling
    "grpo": ("clip", "mean", "group", "response_mean", "token", 0.2, 0.2, 0.04, False),
    "dr_grpo": ("clip", "mean", "none", "constant", "token", 0.2, 0.2, 0.0, False),
    "dapo": ("clip", "mean", "group", "token_mean", "token", 0.2, 0.28, 0.0, True),
    "gspo": ("clip", "mean", "group", "response_mean", "sequence", 3e-4, 4e-4, 0.0, False),
    "cispo": ("cispo", "mean", "group", "token_mean", "token", 0.2, 5.0, 0.0, False),
    "maxrl": ("clip", "mean", "mean", "response_mean", "token", 0.2, 0.2, 0.0, False),
    "gdpo": ("clip", "mean", "group", "response_mean", "token", 0.2, 0.2, 0.0, False),
    "sapo": ("sapo", "mean", "group", "response_mean", "token", 0.2, 0.2, 0.0, False),
    "dppo_tv": ("dppo_tv", "mean", "none", "constant", "token", 0.15, 0.15, 0.0, False),
    "rloo": ("reinforce", "leave_one_out", "none", "response_mean", "token", 0.2, 0.2, 0.0, False),
    "reinforce": ("reinforce", "none", "none", "response_mean", "token", 0.2, 0.2, 0.0, False),
    "reinforce_baseline": ("reinforce", "mean", "group", "response_mean", "token", 0.2, 0.2, 0.0, False),
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(file, name):
    """It is what its paper says; it can be debugged; written to a file and read again it is the same."""
    a = load_config([f"algorithm.name={name}"]).algorithm
    found = (a.objective, a.baseline, a.scale, a.aggregation, a.importance_level, a.epsilon, a.clip_high, a.beta)
    assert (*found, a.dynamic_sampling) == PRESET_TABLE[name]
    assert (a.kl_estimator, a.delta, a.num_iterations, a.num_minibatches) == ("k3", None, 1, 1)
    assert a.multi_objective_aggregation.startswith("normalize") == (name == "gdpo")
    assert a.sampler_correction == "none" and not a.without_effect

    rewards = load_config(["--debug", f"algorithm.name={name}"]).reward.functions
    assert [f.name for f in rewards].count("soft_overlong") == (name == "dapo")

    config = load_config([
        f"algorithm.name={name}", "optim.learning_rate=3e-7", "rollout.stop=['\\n\\n', '#']", "algorithm.mask_truncated_completions=true",
        "data.few_shot=[{prompt: 'α: 1', completion: 'no'}]", "optim.betas=[0.9, 0.95]", "data.system_prompt='yes'",
    ])  # fmt: skip
    for values in (config.model_dump(), config.model_dump(mode="json")):
        again = load_config(file(yaml.safe_dump(values, sort_keys=False, allow_unicode=True)))
        assert again == config
        assert again.model_dump() == config.model_dump()


def test_the_table_of_presets_is_complete():
    assert set(PRESETS) == set(PRESET_TABLE)
    assert Config().algorithm == load_config(["algorithm.name=grpo"]).algorithm


def test_loss_options_are_all_that_the_loss_takes_from_the_configuration():
    options = load_config(
        ["algorithm.name=gspo", "algorithm.delta=1.5", "algorithm.kl_estimator=k1"]
    ).algorithm.loss_options
    keywords = {p.name for p in inspect.signature(policy_loss).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert set(options) == {name for name in keywords if not name.endswith("_BT")} - {"max_length"}
    assert options == dict(
        objective="clip", importance_level="sequence", epsilon=3e-4, epsilon_high=4e-4, delta=1.5, beta=0.0,
        kl_estimator="k1", aggregation="response_mean", unbiased_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        sampler_correction="none", sampler_correction_min=None, sampler_correction_max=3.0, off_policy_mask_threshold=None,
    )  # fmt: skip


def test_what_is_set_beats_the_preset_wherever_it_is_set(file):
    in_file = file("algorithm: {beta: 0.1, name: dapo, epsilon_high: 0.3}\n")
    a = load_config(in_file).algorithm
    assert (a.beta, a.epsilon_high, a.aggregation) == (0.1, 0.3, "token_mean")
    a = load_config([*in_file, "algorithm.aggregation=constant"]).algorithm
    assert (a.beta, a.epsilon_high, a.aggregation) == (0.1, 0.3, "constant")
    for argv in (["algorithm.beta=0.5", "algorithm.name=dr_grpo"], ["algorithm.name=dr_grpo", "algorithm.beta=0.5"]):
        a = load_config(argv).algorithm
        assert (a.beta, a.scale) == (0.5, "none")
    a = load_config(["algorithm={name: gspo}", "algorithm.epsilon=0.01"]).algorithm
    assert (a.epsilon, a.epsilon_high, a.importance_level) == (0.01, 4e-4, "sequence")


def test_epsilon_high_follows_epsilon_unless_it_is_set():
    assert load_config(["algorithm.epsilon=0.3"]).algorithm.clip_high == 0.3
    assert load_config(["algorithm.epsilon=0.3", "algorithm.epsilon_high=0.1"]).algorithm.clip_high == 0.1
    assert load_config(["algorithm.epsilon_high=0.0"]).algorithm.clip_high == 0.0
    assert load_config(["algorithm.name=dapo", "algorithm.epsilon_high=null"]).algorithm.clip_high == 0.2


def test_dapo_adds_its_punishment_once():
    def rewards(*argv):
        return [(f.name, f.weight, f.args) for f in load_config(["algorithm.name=dapo", *argv]).reward.functions]

    # The paper's proportion, 4,096 of 20,480 tokens, is a fifth.
    assert rewards() == [("accuracy", 1.0, {}), ("soft_overlong", 1.0, {"max_length": 256, "cache_length": 51})]
    own = "reward.functions=[{name: format, weight: 0.5}]"
    punished = ("soft_overlong", 1.0, {"max_length": 100, "cache_length": 20})
    assert rewards("rollout.max_completion_length=100", own) == [("format", 0.5, {}), punished]
    named = "reward.functions=[accuracy, {name: soft_overlong, weight: 2.0, args: {max_length: 9, cache_length: 3}}]"
    assert rewards(named) == [("accuracy", 1.0, {}), ("soft_overlong", 2.0, {"max_length": 9, "cache_length": 3})]
    assert rewards("reward.functions=[soft_overlong]") == [("soft_overlong", 1.0, {})]
    assert [f.name for f in load_config([]).reward.functions] == ["accuracy"]  # no other preset, nor the default itself


def test_dapo_does_not_hide_that_there_is_no_reward():
    assert mistakes(["algorithm.name=dapo", "reward.functions=[]"])[0].startswith("reward.functions=[]")


def test_a_gym_task_brings_its_scorer_unless_another_is_named():
    values = add_implied_rewards({"data": {"dataset": "reasoning_gym:chain_sum"}, "algorithm": {"name": "dapo"}})
    names = [f if isinstance(f, str) else f["name"] for f in values["reward"]["functions"]]
    assert names == ["reasoning_gym", "soft_overlong"]
    assert values["eval"] == {"correct_above": 0.99}
    own = {"data": {"dataset": "reasoning_gym:chain_sum"}, "reward": {"functions": ["format"]}}
    assert add_implied_rewards(own) == own
    other = {"data": {"dataset": "builtin:arithmetic"}}
    assert add_implied_rewards(other) == other


# --- mistakes


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rollout.num_generation", "rollout.num_generations"),
        ("rollout.temprature", "rollout.temperature"),
        ("optim.temperature", "rollout.temperature"),  # the right name in the wrong section
        ("algoritm.beta", "algorithm.beta"),
        ("beta", "algorithm.beta"),
        ("temperature", "rollout.temperature"),
        ("evel.temperature", "eval.temperature"),
        ("delta", "algorithm.delta"),
        ("output_dri", "output_dir"),
        ("seeed", "seed"),
        ("rollout.prompts_per_step.x", "rollout.prompts_per_step"),
    ],
)
def test_an_unknown_key_names_the_nearest(file, typed, meant):
    assert mistakes([f"{typed}=1"]) == [f"unknown key {typed!r}; did you mean {meant!r}?"]
    section, _, leaf = typed.rpartition(".")
    if section in Config.model_fields:
        assert mistakes(file(yaml.safe_dump({section: {leaf: 1}}))) == [
            f"unknown key {typed!r}; did you mean {meant!r}?"
        ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("optim.lr", "; did you mean 'optim.learning_rate'?"),
        ("batch_size", "; did you mean 'rollout.prompts_per_step'?"),
        ("algorithm.kl_coef", "; did you mean 'algorithm.beta'?"),
        ("num_gpus", ": the launcher decides: NPROC_PER_NODE=2"),
        ("report_to", ": logging.wandb=online"),
        ("loss_type", ": algorithm.name for grpo"),
        ("peft_config", ": the section lora has its settings"),
        ("lora_r", "; did you mean 'lora.rank'?"),
    ],
)
def test_a_name_from_elsewhere_names_the_key(typed, said):
    (line,) = mistakes([f"{typed}=1"])
    assert line.startswith(f"unknown key {typed!r}{said}")


def test_the_names_from_elsewhere_are_no_keys_and_lead_to_keys():
    known = set(keys_of(Config))
    leaves = {key.rpartition(".")[2] for key in known} | set(Config.model_fields) - {"optim"}
    assert set(ALIASES.values()) <= known
    assert not leaves & (set(ALIASES) | set(EXPLANATIONS))


def test_an_unknown_section_names_the_nearest(file):
    assert mistakes(file("algoritm: {beta: 0.1}\n")) == ["unknown key 'algoritm'; did you mean 'algorithm'?"]
    assert mistakes(file("rolout: {top_k: 1}\n")) == ["unknown key 'rolout'; did you mean 'rollout'?"]


def test_a_key_like_no_other_points_to_the_help():
    assert mistakes(["zzqqxx=1"]) == ["unknown key 'zzqqxx'; --help lists all keys"]


def test_an_unknown_key_of_a_reward_is_refused():
    (line, *_) = mistakes(["reward.functions=[{name: accuracy, wieght: 2}]"])
    assert line.startswith("unknown key 'reward.functions.0.wieght'")
    (line,) = mistakes(["reward.functions=[{name: accuracy, weight: heavy}]"])
    assert line.startswith("reward.functions.0.weight='heavy'") and "number" in line


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("rollout.top_p=1.5", "less than or equal to 1"),
        ("rollout.top_p=0", "greater than 0"),
        ("rollout.temperature=0", "greater than 0"),
        ("rollout.top_k=-1", "greater than or equal to 0"),
        ("rollout.min_p=2", "less than or equal to 1"),
        ("rollout.num_generations=0", "greater than or equal to 1"),
        ("rollout.max_completion_length=1.5", "integer"),
        ("optim.learning_rate=0", "greater than 0"),
        ("optim.learning_rate=fast", "number"),
        ("optim.learning_rate=.inf", "finite"),
        ("optim.learning_rate=.nan", "finite"),
        ("optim.betas=[0.9, 1]", "[0, 1)"),
        ("algorithm.beta=-0.1", "greater than or equal to 0"),
        ("algorithm.ref_sync_alpha=0", "greater than 0"),
        ("algorithm.name=ppo", "'grpo', 'dr_grpo', 'dapo'"),
        ("algorithm.objective=ppo", "'clip', 'cispo', 'sapo', 'dppo_tv' or 'reinforce'"),
        ("algorithm.kl_estimator=k4", "'k1', 'k2' or 'k3'"),
        ("seed=-1", "greater than or equal to 0"),
        (f"seed={2**63}", "less than"),
        ("runtime.precision=fp16", "'bf16' or 'fp32'"),
        ("runtime.device=tpu", "auto|cpu|cuda"),
        ("reward.functions=accuracy", "list"),
        ("reward.functions=[]", "at least 1"),
        ("data.few_shot=[{prompt: 1, completion: a}]", "string"),
        ("output_dir=", "string"),
        ("rollout.top_k=null", "integer"),
        ("rollout.stop=['']", "empty string"),
        ("optim.lr_scheduler_type=reduce_lr_on_plateau", "'cosine'"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_what_is_allowed(override, allowed):
    key, _, value = override.partition("=")
    (line,) = mistakes([override])
    shown = repr(yaml.safe_load(value)) if not key.endswith("betas") else "[0.9, 1]"
    if "few_shot" in key:
        key, shown = "data.few_shot.0.prompt", "1"
    assert line.startswith(f"{key}={shown}: ") and allowed in line


@pytest.mark.parametrize(
    "argv", [["algorithm.name=[1]"], ["algorithm.name={a: 1}"], ["algorithm.name=dapo", "rollout.top_k=[5]"]]
)
def test_a_value_of_the_wrong_kind_is_one_line_too(argv):
    (line,) = mistakes(argv)
    assert line.startswith(argv[-1].partition("=")[0] + "=")


@pytest.mark.parametrize("argv", [["optim=3"], ["optim=[1]"], ["optim="], ["optim=3", "optim.learning_rate=1e-3"]])
def test_a_value_for_a_whole_section_names_a_key_of_it(argv):
    assert mistakes(argv) == ["optim is a section: write optim.learning_rate=..."]


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("seed: 7")
    config = load_config(["--config=~/a.yaml", "output_dir=~/runs/x", "checkpoint.resume=~/runs/y/checkpoint-2"])
    assert (config.seed, config.output_dir) == (7, f"{tmp_path}/runs/x")
    assert config.checkpoint.resume == f"{tmp_path}/runs/y/checkpoint-2"


def test_every_mistake_is_reported_at_once(file):
    lines = mistakes(file("rollout: {top_p: 1.5, top_k: -1}\nseed: x\noptim: {learning_rat: 1}\n"))
    assert len(lines) == 4
    for part in (
        "rollout.top_p=1.5",
        "rollout.top_k=-1",
        "seed='x'",
        "'optim.learning_rat'; did you mean 'optim.learning_rate'",
    ):
        assert any(part in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["rollout.num_generations=1"], ["num_generations=1", ">= 2", "baseline=none"]),
        (["algorithm.name=gdpo", "algorithm.scale=none"], ["normalize_then_sum", "baseline=mean and scale=group"]),
        (["algorithm.name=dppo_tv", "algorithm.importance_level=sequence"], ["dppo_tv", "importance_level=sequence"]),
        (["algorithm.name=dppo_tv", "algorithm.sampler_correction=token_mask"], ["dppo_tv", "token_mask"]),
        (["algorithm.sampler_correction_min=3"], ["sampler_correction_min=3", "below sampler_correction_max=3"]),
        (
            ["algorithm.sampler_correction=token_truncate", "algorithm.sampler_correction_max=null"],
            ["needs sampler_correction_min"],
        ),
        (["rollout.num_generations=1", "algorithm.name=rloo"], ["num_generations=1", "leave_one_out"]),
        (["algorithm.name=rloo", "algorithm.num_iterations=2"], ["reinforce", "num_iterations=2", "clip"]),
        (["algorithm.name=reinforce", "algorithm.num_minibatches=2"], ["reinforce", "num_minibatches=2"]),
        (["algorithm.delta=1.2"], ["delta=1.2", "1.2"]),
        (["algorithm.name=dapo", "algorithm.delta=1.25"], ["delta=1.25", "1.28"]),
        (["algorithm.num_minibatches=3"], ["prompts_per_step=8", "num_minibatches=3", "6 or 9"]),
        (["rollout.prompts_per_step=2", "algorithm.num_minibatches=4"], ["prompts_per_step=2", "prompts_per_step=4"]),
        (["eval.num_samples=8"], ["num_samples=8", "temperature"]),
        (["optim.min_lr=1e-7"], ["min_lr", "cosine", "constant"]),
        (["optim.min_lr=1e-7", "optim.lr_scheduler_type=cosine_with_restarts"], ["optim.min_lr", "=cosine,"]),
        (["optim.min_lr=1e-4", "optim.lr_scheduler_type=cosine"], ["min_lr=0.0001", "learning_rate=1e-06"]),
        (["optim.lr_scheduler_type=cosine_with_min_lr"], ["cosine_with_min_lr", "optim.min_lr"]),
        (["data.prompt_template='{prompt}'", "data.system_prompt=Be brief."], ["data.prompt_template is the whole"]),
        (["data.few_shot=[{prompt: a}]"], ["few_shot", "{prompt, completion}", "['prompt']"]),
        (["data.few_shot=[{prompt: a, completion: b, note: c}]"], ["few_shot", "note"]),
        (["data.few_shot=[{question: a, answer: b}]"], ["few_shot", "['answer', 'question']"]),
    ],
)
def test_values_that_do_not_go_together_name_both(argv, parts):
    (line,) = mistakes(argv)
    for part in parts:
        assert part in line


def test_values_that_do_go_together():
    load_config(["rollout.num_generations=1", "algorithm.name=reinforce"])
    load_config(["algorithm.num_iterations=4", "algorithm.num_minibatches=2"])
    load_config(["algorithm.delta=1.3", "algorithm.epsilon_high=0.28"])
    load_config(["optim.min_lr=1e-7", "optim.lr_scheduler_type=cosine"])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("seed: 1\noutput_dir: x\nseed: 2\n", 3, "key 'seed' is given twice"),
        ("rollout:\n  top_k: 1\n  top_k: 1\n", 3, "key 'top_k' is given twice"),
        ("rollout: {top_k: 1}\nseed: 1\nrollout: {top_p: 0.5}\n", 3, "key 'rollout' is given twice"),
        ("seed: 1\nrollout: [1\n", 3, "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", 1, "not valid YAML"),
        ("rollout:\n  top_k: 3\n bad: [\n", 3, "not valid YAML"),
        ("seed: 1\nrollout: \0\n", 2, "not valid YAML: character '\\x00'"),
    ],
)
def test_a_file_that_is_not_right_names_the_line(file, text, line, message):
    argv = file(text)
    (only,) = mistakes(argv)
    assert only.startswith(f"{argv[1]}:{line}: ") and message in only


def test_an_override_that_is_not_yaml_names_the_key():
    assert mistakes(["data.few_shot=[{"])[0].startswith("data.few_shot=:1: not valid YAML")


def test_files_that_cannot_be_used(file, tmp_path):
    assert "none.yaml does not exist" in mistakes(["--config", str(tmp_path / "none.yaml")])[0]
    assert "--config" in mistakes(["--config"])[0]
    assert "cannot be read: Is a directory" in mistakes(["--config", str(tmp_path)])[0]
    assert "expected a mapping" in mistakes(file("- 1\n- 2\n"))[0]
    (tmp_path / "latin.yaml").write_bytes(b"output_dir: \xff\xfe\n")
    assert "cannot be read: it is not UTF-8" in mistakes(["--config", str(tmp_path / "latin.yaml")])[0]


@pytest.mark.parametrize("argument", ["foo", "--verbose", "--conf", "=3", "-x=1", "--seed=1"])
def test_arguments_that_are_not_understood(argument):
    (line,) = mistakes([argument])
    assert repr(argument) in line and "section.key=value" in line


def test_mistakes_are_value_errors():
    assert issubclass(ConfigError, ValueError)


# --- the object


def test_a_configuration_is_frozen():
    config = Config()
    for section, key in ((config, "seed"), (config.rollout, "top_k"), (config.algorithm, "beta")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 1)
    with pytest.raises(ValidationError, match="Extra inputs"):
        Config(sed=1)


def test_two_configurations_share_no_list():
    one, other = Config(), Config()
    one.rollout.stop.append("x")
    one.reward.functions.clear()
    assert other == Config() and other.rollout.stop == [] and len(other.reward.functions) == 1


def test_the_configuration_imports_no_torch():
    """A typing error is reported at once, without the seconds that these imports take."""
    code = (
        "import sys; from grpo.config import load_config; load_config(['rollout.top_k=3']);"
        "print([m for m in ('torch', 'transformers', 'datasets', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    output = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


KEYS_THAT_HOLD = {
    "output_dir": ..., "seed": 0,
    "model.name_or_path": ..., "model.attn_implementation": "sdpa", "model.gradient_checkpointing": False,
    "model.disable_dropout": True, "model.fp32_head": False, "model.trust_remote_code": False,
    "data.dataset": ..., "data.config_name": ..., "data.train_split": ..., "data.eval_split": ..., "data.prompt_column": ...,
    "data.answer_column": ..., "data.answer_pattern": ..., "data.system_prompt": ..., "data.few_shot": ...,
    "data.max_prompt_length": 512, "data.max_train_samples": ..., "data.max_eval_samples": ...,
    "reward.functions": ..., "reward.timeout_s": 10, "reward.num_workers": ...,
    "rollout.prompts_per_step": 8, "rollout.num_generations": 8, "rollout.max_completion_length": 256,
    "rollout.temperature": 1.0, "rollout.top_p": 1.0, "rollout.top_k": 0, "rollout.min_p": 0.0, "rollout.stop": [],
    "rollout.tokens_in_flight": ...,
    "algorithm.name": "grpo", "algorithm.objective": ..., "algorithm.baseline": ..., "algorithm.scale": ...,
    "algorithm.aggregation": ..., "algorithm.importance_level": ..., "algorithm.epsilon": 0.2, "algorithm.epsilon_high": ...,
    "algorithm.delta": ..., "algorithm.beta": 0.04, "algorithm.kl_estimator": "k3", "algorithm.num_iterations": 1,
    "algorithm.num_minibatches": 1, "algorithm.mask_truncated_completions": False, "algorithm.dynamic_sampling": False,
    "algorithm.ref_sync_steps": 0, "algorithm.ref_sync_alpha": 1.0,
    "optim.learning_rate": 1e-6, "optim.betas": ..., "optim.weight_decay": ..., "optim.max_grad_norm": 1.0,
    "optim.lr_scheduler_type": ..., "optim.warmup_steps": ..., "optim.min_lr": ..., "optim.max_steps": ...,
    "optim.num_epochs": ..., "optim.tokens_per_microbatch": ...,
    "eval.every": ..., "eval.before_training": True, "eval.num_samples": 1, "eval.temperature": 0.0, "eval.max_samples": ...,
    "eval.top_p": 1.0, "eval.top_k": 0, "eval.min_p": 0.0, "eval.max_completion_length": None, "rollout.prompts_per_rank": None,
    "checkpoint.save_steps": ..., "checkpoint.keep": 2, "checkpoint.resume": "auto",
    "logging.wandb": "disabled", "logging.project": ..., "logging.run_name": ..., "logging.log_completions": 4, "logging.every": 1,
    "runtime.device": "auto", "runtime.precision": "bf16", "runtime.timeout_s": ..., "runtime.deterministic": False,
    "runtime.threads_per_rank": ..., "runtime.try_largest_step": None,
}  # fmt: skip
"""Key -> default where it is fixed, else ``...``. Configurations out there use these names."""


def test_the_keys_that_hold():
    config = Config()
    for key, default in KEYS_THAT_HOLD.items():
        assert key in keys_of(Config), key
        assert default is ... or value_at(config, key) == default, key


# --- help


def test_help_lists_every_key_with_type_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.strip() == help_text(Config).strip()
    lines = text.splitlines()
    assert len(keys_of(Config)) >= len(KEYS_THAT_HOLD)
    for key in keys_of(Config):
        (number,) = [n for n, line in enumerate(lines) if line.startswith(f"{key}  (")]
        assert "; default " in lines[number] and lines[number].endswith(")")
        assert lines[number + 1].startswith("    ") and len(lines[number + 1].split()) >= 2, key
    assert "rollout.temperature  (float; default 1.0)" in lines
    assert "algorithm.epsilon_high  (float | none; default none)" in lines
    assert "algorithm.objective  (clip | cispo | sapo | dppo_tv | reinforce; default clip)" in lines


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["eval.num_samples"], ["eval.num_samples"]),
        (["optim"], [key for key in keys_of(Config) if key.startswith("optim.")]),
        (["learning_rate", "seed=1"], ["optim.learning_rate"]),
        (["lr"], ["optim.learning_rate", "optim.lr_scheduler_type", "optim.min_lr"]),
        (["kl_coef"], ["algorithm.beta"]),
        (["keep", "seed"], ["seed", "rollout.keep_sampling_mask", "checkpoint.keep", "checkpoint.keep_best"]),
    ],
)
def test_help_on_some_keys(capsys, words, keys):
    with pytest.raises(SystemExit):
        load_config(["--help", *words])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  (")[0] for line in lines if line and not line.startswith(" ")] == keys


def test_help_on_no_key():
    assert mistakes(["--help", "learning_rates"]) == [
        "--help learning_rates: no key contains this word; did you mean 'optim.learning_rate'?"
    ]
    assert mistakes(["zzqqxx", "--help"])[0].endswith("no key contains this word; --help lists all keys")


# --- --debug


def test_debug_caps_sizes_and_keeps_smaller_ones(file):
    argv = file(
        "output_dir: runs/x/\nrollout: {prompts_per_step: 64, num_generations: 16, max_completion_length: 1024}\n"
        "optim: {max_steps: 1000, learning_rate: 1e-5}\ncheckpoint: {save_steps: 5, resume: auto}\nlogging: {wandb: online, every: 10}\n"
        "eval: {num_samples: 8, temperature: 1.0, max_samples: 500}\nalgorithm: {name: gspo}\n"
    )
    config = load_config([*argv, "--debug"])
    r = config.rollout
    assert (r.prompts_per_step, r.num_generations, r.max_completion_length) == (2, 4, 64)
    assert (config.optim.max_steps, config.eval.num_samples, config.eval.max_samples) == (2, 1, 4)
    assert (config.data.max_train_samples, config.data.max_eval_samples) == (32, 4)
    assert (config.checkpoint.resume, config.checkpoint.save_steps, config.logging.wandb) == ("never", None, "disabled")
    assert config.debug and config.output_dir == "runs/x-debug"
    assert (config.optim.learning_rate, config.algorithm.importance_level) == (
        1e-5,
        "sequence",
    )  # the rest is the config's own
    smaller = load_config(
        ["--debug", "rollout.num_generations=2", "rollout.max_completion_length=8", "optim.max_steps=1"]
    )
    assert (smaller.rollout.num_generations, smaller.rollout.max_completion_length, smaller.optim.max_steps) == (
        2,
        8,
        1,
    )
    longer = load_config(["--debug", "eval.max_completion_length=100"])
    assert (smaller.eval.max_completion_length, longer.eval.max_completion_length) == (None, 64)
    assert not load_config(argv).debug


def test_debug_takes_a_config_that_keeps_its_best_and_one_of_a_debug_run():
    config = load_config(
        ["--debug", "output_dir=x", "eval.num_samples=8", "eval.temperature=1", "checkpoint.keep_best=eval/mean@8"]
    )
    assert config.checkpoint.keep_best is None and config.eval.num_samples == 1
    assert load_config(["debug=true", "output_dir=x-debug", "optim.max_steps=50"]).optim.max_steps == 2
    assert load_config(["debug=true", "output_dir=x-debug"]).output_dir == "x-debug"
    assert load_config(["--debug", "output_dir=x-debug"]).output_dir == "x-debug-debug", "that could be another run's"


def test_debug_keeps_a_step_that_can_be_cut_into_minibatches():
    config = load_config(["--debug", "algorithm.num_minibatches=4", "rollout.prompts_per_step=16"])
    assert config.rollout.prompts_per_step == 4


# --- ranks


@pytest.mark.parametrize(
    ("prompts", "minibatches", "ranks", "works"),
    [(10, 1, 4, "8 or 12"), (3, 1, 8, "8"), (9, 1, 2, "8 or 10"), (6, 3, 4, "12"), (100, 4, 8, "96 or 128")],
)
def test_a_step_that_does_not_divide_over_the_ranks_names_what_would(prompts, minibatches, ranks, works):
    config = load_config([f"rollout.prompts_per_step={prompts}", f"algorithm.num_minibatches={minibatches}"])
    with pytest.raises(ValueError, match=rf"prompts_per_step={prompts} .*{ranks} ranks.*prompts_per_step={works}$"):
        check_world_size(config, ranks)
    for number in works.split(" or "):
        good = load_config([f"rollout.prompts_per_step={number}", f"algorithm.num_minibatches={minibatches}"])
        check_world_size(good, ranks)
        assert math.gcd(int(number), ranks * minibatches) == ranks * minibatches


@pytest.mark.parametrize(
    ("prompts", "ranks", "machines", "fewer", "larger"),
    [(4, 8, 1, "4 (or 2, 1)", "8"), (20, 8, 1, "5 (or 4, 2, 1)", "24"), (1, 8, 1, "1", "8"), (20, 16, 2, "5 (or 2, 1)", "32"),
     (3, 16, 2, None, "16")],
)  # fmt: skip
def test_the_numbers_of_ranks_that_work_are_offered_and_launch_sh_takes_the_largest(
    capsys, prompts, ranks, machines, fewer, larger
):
    argv = [f"rollout.prompts_per_step={prompts}"]
    with pytest.raises(ValueError, match=f"is not a multiple of {ranks} ranks: use ") as refused:
        check_world_size(load_config(argv), ranks, num_machines=machines)
    _, _, advice = str(refused.value).partition("use ")
    assert advice.startswith(f"--nproc_per_node={fewer}, or rollout.prompts_per_step=" if fewer else "rollout.")
    assert advice.endswith((f"={larger}", f" or {larger}"))
    gpus = ranks // machines
    assert fitting_ranks(gpus, machines, argv) == (int(fewer.split()[0]) if fewer else gpus)
    note = f"not a multiple of {ranks}; rollout.prompts_per_step={larger} uses all\n"
    assert capsys.readouterr().err.endswith(note if fewer else "")
    assert fitting_ranks(gpus, machines, ["rollout.prompts_per_rank=1"]) == gpus
    assert fitting_ranks(gpus, machines, ["a.mistake=1"]) == gpus, "the ranks say what is wrong"


def test_shards_must_divide_the_ranks():
    config = Config(runtime=dict(parallel="fsdp", shard_size=4), rollout=dict(prompts_per_step=24))
    check_world_size(config, 8)
    check_world_size(config, 1)  # trains as under DDP
    check_world_size(load_config(["--debug", "runtime.parallel=fsdp", "runtime.offload=all"]), 1)
    with pytest.raises(ValueError, match="shard_size=4 does not divide 6 ranks: use 2 or 3 or 6, or null for all"):
        check_world_size(config, 6)


def test_any_number_of_prompts_fits_one_rank():
    for prompts in (1, 7, 8):
        check_world_size(load_config([f"rollout.prompts_per_step={prompts}"]), 1)


def test_problems_per_rank_are_multiplied_by_the_ranks(file, monkeypatch):
    per_rank = file("rollout: {prompts_per_rank: 4}\n")
    size = lambda argv, **options: load_config(argv, **options).rollout.prompts_per_step  # noqa: E731
    assert (size(per_rank), size(per_rank, num_ranks=8)) == (4, 32)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    assert (
        load_config(per_rank).rollout
        == load_config(["rollout.prompts_per_step=8", "rollout.prompts_per_rank=4"]).rollout
    )
    assert make_config({"rollout": {"prompts_per_rank": 4}}).rollout.prompts_per_step == 8
    # A later source replaces the other key of an earlier one.
    assert size([*per_rank, "rollout.prompts_per_step=6"]) == 6
    assert size([*file("rollout: {prompts_per_step: 6}\n"), "rollout.prompts_per_rank=5"]) == 10
    assert (
        make_config({"rollout.prompts_per_rank": 5}, {"rollout": {"prompts_per_step": 6}}).rollout.prompts_per_step == 6
    )
    assert load_config([*per_rank, "--debug"]).rollout.prompts_per_step == 2
    both = file("rollout: {prompts_per_step: 6, prompts_per_rank: 4}\n")
    assert mistakes(both) == [
        "rollout.prompts_per_step=6 and rollout.prompts_per_rank=4 on 2 rank(s), that is prompts_per_step=8, contradict each other: "
        "set one of the two"
    ]
    assert mistakes([*per_rank, "algorithm.num_minibatches=3"]) == [
        "rollout.prompts_per_rank=4 cannot be cut into algorithm.num_minibatches=3 equal parts: use prompts_per_rank=3 or 6"
    ]


def test_debug_is_single_process():
    config = load_config(["--debug"])
    check_world_size(config, 1)
    with pytest.raises(ValueError, match=r"single-process.*2 processes"):
        check_world_size(config, 2)


def test_what_a_run_from_an_adapter_writes_is_read_again(tmp_path):
    written = load_config(["--config=/dev/null", f"model.adapter={tmp_path}"]).for_writing()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    assert load_config([f"--config={tmp_path}/config.yaml"]).for_writing() == written
    with pytest.raises(ValueError, match=r"lora\.rank and model\.adapter="):
        load_config(["--config=/dev/null", f"model.adapter={tmp_path}", "lora.rank=8"])

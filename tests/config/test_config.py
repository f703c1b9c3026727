"""Configuration: where a value comes from, what each preset means, and one clear line for each mistake."""

import ast
import inspect
from pathlib import Path

import pytest
import yaml

import train_grpo
from grpo.algorithm.loss import policy_loss
from grpo.config import (
    PRESETS,
    Config,
    ConfigError,
    check_world_size,
    help_text,
    keys_of,
    keys_without_effect,
    load_config,
    make_config,
)
from grpo.config.aliases import OTHER_NAMES, SECTIONS
from grpo.config.config import add_implied_rewards


@pytest.fixture
def file(tmp_path):
    """Writes YAML text and returns the arguments that load it."""

    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return ["--config", str(path)]

    return write


def mistakes(argv):
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value).splitlines()


# --- where a value comes from


def test_defaults_then_file_then_overrides_then_later_overrides(file):
    argv = file("rollout: {top_k: 5, temperature: 0.5, num_generations: 16}\nseed: 1\n")
    config = load_config([*argv, "rollout.temperature=0.7", "seed=2", "rollout={min_p: 0.1}", "seed=3"])
    assert config.rollout.prompts_per_step == 8  # default
    assert (config.rollout.top_k, config.rollout.num_generations) == (5, 16)  # file
    assert (config.rollout.temperature, config.rollout.min_p) == (0.7, 0.1)  # overrides
    assert config.seed == 3  # later override
    assert load_config(["seed=4", *argv]).seed == 4  # wherever the override stands
    changed = make_config(argv[1], {"rollout.top_k": 6, "rollout": {"top_p": 0.5}}, {"seed": 2})
    assert (changed.rollout.top_k, changed.rollout.top_p, changed.rollout.num_generations) == (6, 0.5, 16)
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
    assert "configs/tiny_arithmetic.yaml" in output.out and "eval.num_samples=8 at eval.temperature=0" in output.err


def test_overrides_are_read_as_yaml():
    config = load_config([
        "rollout.stop=[\"\\n\", 'Q:']", "optim.betas=[0.9, 0.95]", "data.config_name=null",
        "runtime.deterministic=true",
        "reward.functions=[accuracy, {name: format, weight: 0.5, args: {tag: think}}]",
        "data.few_shot=[{prompt: '2+2', completion: '4'}]", "data.train_split=train[:90%]",
        "eval={num_samples: 4, temperature: 1.0}", "eval.max_samples=7",
    ])  # fmt: skip
    assert config.rollout.stop == ["\n", "Q:"] and config.optim.betas == (0.9, 0.95)
    functions = [(f.name, f.weight, f.args) for f in config.reward.functions]
    assert functions == [("accuracy", 1.0, {}), ("format", 0.5, {"tag": "think"})]
    assert config.data.few_shot == [{"prompt": "2+2", "completion": "4"}]
    assert config.data.config_name is None and config.data.train_split == "train[:90%]"
    assert (config.eval.num_samples, config.eval.max_samples, config.runtime.deterministic) == (4, 7, True)


def test_none_is_read_as_the_help_writes_it(file):
    """Where a key can be unset; ``algorithm.scale`` has a choice of that name."""
    config = load_config([*file("eval: {max_samples: none}"), "algorithm.delta=none", "algorithm.scale=none"])
    assert (config.eval.max_samples, config.algorithm.delta, config.algorithm.scale) == (None, None, "none")
    assert mistakes(["rollout.top_k=none"])[0].startswith("rollout.top_k='none': input should be a valid integer")


@pytest.mark.parametrize("text", ["Question: {prompt}", "{prompt}", "{prompt}: {level}", "{prompt} # now"])
def test_a_text_needs_no_quotes_of_yaml(text):
    assert load_config([f"data.question_template={text}"]).data.question_template == text
    assert load_config([f"data.question_template='{text}'"]).data.question_template == text
    assert load_config([f"output_dir={text}"]).output_dir == text
    assert load_config(["data.system_prompt=no", "data.answer_pattern=#### (.+)"]).data.system_prompt == "no"


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", "+1e-6", "1_0e-7"])
def test_scientific_notation_is_a_number(file, text):
    functions = f"[{{name: accuracy, args: {{value: {text}}}}}]"  # no declared type would turn a text into a number
    for argv in ([f"reward.functions={functions}"], file(f"reward: {{functions: {functions}}}\n")):
        assert load_config(argv).reward.functions[0].args == {"value": 1e-6}


def test_yaml_anchors_and_merges_work(file):
    argv = file("rollout: &sampling {temperature: 0.5}\neval:\n  <<: *sampling\n  num_samples: 4\n")
    assert load_config(argv).eval.temperature == 0.5


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("seed: 7")
    config = load_config(["--config=~/a.yaml", "output_dir=~/runs/x", "checkpoint.resume=~/c", "model.adapter=~/a"])
    assert (config.seed, config.output_dir) == (7, f"{tmp_path}/runs/x")
    assert (config.checkpoint.resume, config.model.adapter) == (f"{tmp_path}/c", f"{tmp_path}/a")


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


@pytest.mark.parametrize("name", sorted({*PRESETS, *PRESET_TABLE}))
def test_every_preset(file, name):
    """It is what its paper says; it can be debugged; written to a file and read again it is the same."""
    config = load_config([f"algorithm.name={name}"])
    a = config.algorithm
    found = (a.objective, a.baseline, a.scale, a.aggregation, a.importance_level, a.epsilon, a.clip_high, a.beta)
    assert (*found, a.dynamic_sampling) == PRESET_TABLE[name]
    assert (a.kl_estimator, a.delta, a.num_iterations, a.num_minibatches) == ("k3", None, 1, 1)
    assert a.multi_objective_aggregation.startswith("normalize") == (name == "gdpo")
    assert a.sampler_correction == "none" and not keys_without_effect(config)

    rewards = load_config(["--debug", f"algorithm.name={name}"]).reward.functions
    assert [f.name for f in rewards].count("soft_overlong") == (name == "dapo")

    config = load_config([
        f"algorithm.name={name}", "optim.learning_rate=3e-7", "rollout.stop=['\\n\\n', '#']",
        "data.few_shot=[{prompt: 'α: 1', completion: 'no'}]", "optim.betas=[0.9, 0.95]", "data.system_prompt='yes'",
    ])  # fmt: skip
    for values in (config.model_dump(), config.for_writing()):
        again = load_config(file(yaml.safe_dump(values, sort_keys=False, allow_unicode=True)))
        assert again == config and again.model_dump() == config.model_dump()


def test_the_page_gives_the_loss_each_of_its_settings():
    """By name: a forgotten one would silently have its default."""
    page = ast.parse(Path(train_grpo.__file__).read_text())
    calls = [node for node in ast.walk(page) if isinstance(node, ast.Call)]
    (call,) = [c for c in calls if ast.unparse(c.func) == "policy_loss"]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    known = {p.name for p in inspect.signature(policy_loss).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert set(given) == known - {"sapo_temperature_pos", "sapo_temperature_neg"}
    of_batch = {name: f"micro.{name}" for name in given if name.endswith("_BT")}
    of_learner = {"objective": "learner.objective", "max_length": "learner.max_length"}
    assert given == {name: f"algorithm.{name}" for name in given} | of_batch | of_learner


def test_what_is_set_beats_the_preset_wherever_it_is_set(file):
    in_file = file("algorithm: {beta: 0.1, name: dapo, epsilon_high: 0.3}\n")
    a = load_config([*in_file, "algorithm.aggregation=constant"]).algorithm
    assert (a.beta, a.epsilon_high, a.aggregation, a.dynamic_sampling) == (0.1, 0.3, "constant", True)
    for argv in (["algorithm.beta=0.5", "algorithm.name=dr_grpo"], ["algorithm.name=dr_grpo", "algorithm.beta=0.5"]):
        a = load_config(argv).algorithm
        assert (a.beta, a.scale) == (0.5, "none")
    a = load_config(["algorithm={name: gspo}", "algorithm.epsilon=0.01"]).algorithm
    assert (a.epsilon, a.epsilon_high, a.importance_level) == (0.01, 4e-4, "sequence")
    assert load_config(["algorithm.epsilon=0.3"]).algorithm.clip_high == 0.3
    assert load_config(["algorithm.epsilon=0.3", "algorithm.epsilon_high=0.0"]).algorithm.clip_high == 0.0
    assert load_config(["algorithm.name=dapo", "algorithm.epsilon_high=null"]).algorithm.clip_high == 0.2


def test_dapo_adds_its_punishment_once():
    def rewards(*argv):
        return [(f.name, f.weight, f.args) for f in load_config(["algorithm.name=dapo", *argv]).reward.functions]

    # The paper's proportion, 4,096 of 20,480 tokens, is a fifth.
    assert rewards() == [("accuracy", 1.0, {}), ("soft_overlong", 1.0, {"max_length": 512, "cache_length": 102})]
    own = "reward.functions=[{name: format, weight: 0.5}]"
    punished = ("soft_overlong", 1.0, {"max_length": 100, "cache_length": 20})
    assert rewards("rollout.max_completion_length=100", own) == [("format", 0.5, {}), punished]
    named = "reward.functions=[accuracy, {name: soft_overlong, weight: 2.0, args: {max_length: 9, cache_length: 3}}]"
    assert rewards(named) == [("accuracy", 1.0, {}), ("soft_overlong", 2.0, {"max_length": 9, "cache_length": 3})]
    assert [f.name for f in load_config([]).reward.functions] == ["accuracy"]
    assert mistakes(["algorithm.name=dapo", "reward.functions=[]"])[0].startswith("reward.functions=[]")


def test_a_gym_task_brings_its_scorer_unless_another_is_named():
    values = add_implied_rewards({"data": {"dataset": "reasoning_gym:chain_sum"}, "algorithm": {"name": "dapo"}})
    names = [f if isinstance(f, str) else f["name"] for f in values["reward"]["functions"]]
    assert names == ["reasoning_gym", "soft_overlong"] and values["eval"] == {"correct_above": 0.99}
    own = {"data": {"dataset": "reasoning_gym:chain_sum"}, "reward": {"functions": ["format"]}}
    assert add_implied_rewards(own) == own


# --- mistakes


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("rollout.num_generation", "; did you mean 'rollout.num_generations'?"),
        ("optim.temperature", "; did you mean 'rollout.temperature'?"),  # the right name in the wrong section
        ("evel", "; did you mean 'eval'?"),
        ("beta", "; did you mean 'algorithm.beta'?"),
        ("output_dri", "; did you mean 'output_dir'?"),
        ("algoritm", "; did you mean 'algorithm'?"),
        ("optim.lr", "; did you mean 'optim.learning_rate'?"),
        ("vllm_server_timeout", "; did you mean 'runtime.timeout_s'?"),
        ("torch_compile", "; see --help all, or docs/from_trl.md"),
    ],
)
def test_an_unknown_key_names_the_nearest(typed, said):
    assert mistakes([f"{typed}=1"]) == [f"unknown key {typed!r}{said}"]


def test_the_names_from_elsewhere_are_no_keys_and_lead_to_keys():
    known = set(keys_of(Config))
    assert not OTHER_NAMES.keys() & ({key.rpartition(".")[2] for key in known} | set(Config.model_fields) - {"optim"})
    assert SECTIONS.keys() == {key.split(".")[0] for key in known if "." in key}
    for meant in (*OTHER_NAMES.values(), *SECTIONS.values()):
        assert meant in known or " " in meant, meant


OUT_OF_RANGE = [
    ("rollout.top_p=1.5", "less than or equal to 1"), ("rollout.temperature=0", "greater than 0"),
    ("rollout.num_generations=0", "greater than or equal to 1"), ("rollout.max_completion_length=1.5", "integer"),
    ("optim.learning_rate=fast", "number"), ("optim.learning_rate=.nan", "finite"), ("seed=-1", "greater than"),
    ("algorithm.name=ppo", "'grpo', 'dr_grpo', 'dapo'"), ("algorithm.name=[1]", "'grpo'"),
    ("reward.functions=accuracy", "list"), ("reward.functions=[]", "at least 1"), ("rollout.top_k=null", "integer"),
    ("optim.lr_scheduler_type=reduce_lr_on_plateau", "'cosine'"), ("lora.init=pissa", "True or 'gaussian'"),
    ("data.question_template=x", "{prompt"), ("data.prompt_template=x", "{prompt"), ("rollout.engine=sglang", "'vllm'"),
    ("rollout.server=[]", "http://host"), ("lora.rank=true", "not true or false"),
    ("rollout.server=host:8000", "http://host"), ("rollout.vllm_command=vllm serve {name}", "{model}"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "allowed"), OUT_OF_RANGE)
def test_a_value_out_of_range_names_key_value_and_what_is_allowed(override, allowed):
    key, _, value = override.partition("=")
    (line,) = mistakes([override])
    shown = repr(value if " " in value else yaml.safe_load(value))
    assert line.startswith(f"{key}={shown}: ") and allowed in line.replace("\\", "")


SAMPLER_MIN = "algorithm.sampler_correction_min"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["optim=3"], ["optim is a section: the optimizer is AdamW", "; write optim.KEY=VALUE, or in Python optim={"]),
        (["model=someone/model"], ["model is a section: model.name_or_path names the model; write model.KEY=VALUE"]),
        (["data=rows.jsonl"], ["data is a section: data.dataset names the rows"]),
        (["reward.functions=[{name: accuracy, weight: heavy}]"], ["reward.functions.0.weight='heavy'", "number"]),
        (["reward.functions=[{name: accuracy, wieght: 2}]"], ["unknown key 'reward.functions.0.wieght'"]),
        (["optim.betas=[0.9, 1]"], ["optim.betas.1=1", "less than 1"]),
        (["rollout.stop=['']"], ["rollout.stop.0=''", "at least 1 character"]),
        (["rollout.num_generations=1"], ["num_generations=1", ">= 2", "baseline=none"]),
        (["algorithm.name=gdpo", "algorithm.scale=none"], ["gdpo", "baseline=mean and scale=group"]),
        (["algorithm.name=dppo_tv", "algorithm.importance_level=sequence"], ["dppo_tv", "importance_level=token"]),
        (["algorithm.name=rloo", "algorithm.num_iterations=2"], ["reinforce", "num_iterations=1", "clip"]),
        (["algorithm.name=dapo", "algorithm.delta=1.25"], ["delta=1.25", "1.28"]),
        (["algorithm.sampler_correction=geometric_mask", f"{SAMPLER_MIN}=0.99"], ["needs both bounds", "max=1.01"]),
        (["algorithm.sampler_correction=token_mask", f"{SAMPLER_MIN}=5"], ["min=5.0 and _max=3.0 must lie around 1"]),
        (["algorithm.num_minibatches=3"], ["prompts_per_step=8", "num_minibatches=3", "6 or 9"]),
        (["eval.num_samples=8"], ["num_samples=8", "temperature"]),
        (["optim.min_lr=1e-7"], ["min_lr", "cosine", "constant"]),
        (["optim.min_lr=1e-4", "optim.lr_scheduler_type=cosine"], ["min_lr=0.0001", "learning_rate=1e-06"]),
        (["data.prompt_template={prompt}", "data.system_prompt=a"], ["data.prompt_template takes no system_prompt"]),
        (["data.few_shot=[{prompt: a, completion: b, note: c}]"], ["few_shot", "{prompt, completion}"]),
        (["runtime.offload=all"], ["offload", "runtime.parallel=fsdp"]),
        (["lora.rank=8", "lora.dropout=0.1"], ["lora.dropout", "disable_dropout=false"]),
        (["model.adapter=x", "lora.rank=8"], ["lora.rank and model.adapter=x contradict", "leave lora.rank out"]),
        (["lora.rank=8", "algorithm.ref_sync_steps=2", "algorithm.ref_sync_alpha=0.5"], ["ref_sync_alpha must be 1"]),
        (["rollout.vllm_command=env HF_TOKEN=hf vllm serve {model}"], ["rollout.vllm_command: HF_TOKEN is a secret"]),
        (["rollout.server=http://me:pass@host:8000"], ["rollout.server: a password in an address is a secret"]),
        (["rollout.engine=vllm", "rollout.keep_sampling_mask=true"], ["keep_sampling_mask=true", "engine=builtin"]),
        (["data.few_shot=[{"], ["data.few_shot=: not valid YAML"]),
        (["--config", "nowhere.yaml"], ["config file nowhere.yaml cannot be read", "No such file"]),
        (["--seed=1"], ["'--seed=1'", "section.key=value"]),
        (["--help", "zzqqxx"], ["--help zzqqxx", "see --help all"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_what_would_work(argv, parts):
    try:
        (line,) = mistakes(argv)
    except ValueError as error:  # of --help
        line = str(error)
    for part in parts:
        assert part in line
    assert "pass@" not in line and "=hf " not in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\noutput_dir: x\nseed: 2\n", "key 'seed' is there twice in \"<unicode string>\", line 3"),
        ("rollout:\n  top_k: 1\n  top_k: 1\n", "key 'top_k' is there twice"),
        ("seed: 1\nrollout: [1\n", "line 3"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("seed: \0\n", "special characters are not allowed"),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_a_file_that_is_not_right_is_named(file, text, message):
    argv = file(text)
    (only,) = mistakes(argv)
    assert only.startswith(f"{argv[1]}: ") and message in only


def test_every_mistake_is_reported_at_once(file):
    lines = mistakes(file("rollout: {top_p: 1.5, top_k: -1}\nseed: x\noptim: {learning_rat: 1}\n"))
    assert sorted(line.split(":")[0].split(";")[0] for line in lines) == [
        "rollout.top_k=-1", "rollout.top_p=1.5", "seed='x'", "unknown key 'optim.learning_rat'",
    ]  # fmt: skip


DEFAULTS_THAT_HOLD = {
    "seed": 0, "model.attn_implementation": "sdpa", "model.gradient_checkpointing": False,
    "model.disable_dropout": True, "model.trust_remote_code": False, "data.max_prompt_length": 512,
    "reward.timeout_s": 10, "rollout.prompts_per_step": 8, "rollout.num_generations": 8,
    "rollout.max_completion_length": 512, "rollout.temperature": 1.0, "rollout.top_p": 1.0, "rollout.top_k": 0,
    "rollout.min_p": 0.0, "rollout.stop": [], "algorithm.name": "grpo", "algorithm.epsilon": 0.2,
    "algorithm.beta": 0.04, "algorithm.kl_estimator": "k3", "algorithm.num_iterations": 1,
    "algorithm.num_minibatches": 1, "algorithm.mask_truncated_completions": False,
    "algorithm.dynamic_sampling": False, "algorithm.ref_sync_steps": 0, "algorithm.ref_sync_alpha": 1.0,
    "optim.learning_rate": 1e-06, "optim.max_grad_norm": 1.0, "eval.num_samples": 1, "eval.before_training": True,
    "eval.temperature": 0.0, "eval.max_completion_length": None, "checkpoint.keep": 2, "checkpoint.resume": "auto",
    "logging.wandb": "disabled", "logging.log_completions": 4, "logging.every": 1, "runtime.device": "auto",
    "runtime.precision": "bf16", "runtime.deterministic": False, "runtime.parallel": "ddp",
}  # fmt: skip


def test_the_keys_that_hold_and_their_number():
    keys = keys_of(Config)
    assert {key: keys[key].default for key in DEFAULTS_THAT_HOLD} == DEFAULTS_THAT_HOLD
    assert len(keys) <= 128


# --- help


def test_help_lists_every_key_with_type_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help", "all"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and " at 0x" not in text and "; default )" not in text
    lines = text.splitlines()
    for key in keys_of(Config):
        (number,) = [n for n, line in enumerate(lines) if line.startswith(f"{key}  (")]
        assert "; default " in lines[number] and lines[number].endswith(")")
        assert lines[number + 1].startswith("    ") and len(lines[number + 1].split()) >= 2, key
    for line in (
        "rollout.temperature  (float; default 1.0)", "algorithm.epsilon_high  (float | none; default none)",
        "model.adapter  (str | none; default none)", "data.conversational  (auto | true | false; default auto)",
        "algorithm.kl_estimator  (k1 | k2 | k3; default k3)", "algorithm.objective  (str; default clip)",
        "optim.betas  (list[float, float]; default [0.9, 0.999])", "lora.alpha  (int | none; default none)",
        "reward.functions  (list[mapping]; default [{name: accuracy}])",
    ):  # fmt: skip
        assert line in lines


def test_help_without_a_word_is_one_screen_with_a_line_per_section():
    lines = help_text(Config).splitlines()
    assert {*Config.model_fields} <= {line.split(" ")[0] for line in lines}
    assert "checkpoint   save_steps, keep, keep_best, resume, accept_changes" in lines
    assert len(lines) <= 27 and max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["eval.num_samples"], ["eval.num_samples"]),
        (["optim"], [key for key in keys_of(Config) if key.startswith("optim.")]),
        (["lr"], ["optim.learning_rate", "optim.lr_scheduler_type", "optim.min_lr"]),
        (["kl_coef", "seed=1"], ["algorithm.beta"]),
        (["keep", "seed"], ["seed", "rollout.keep_sampling_mask", "checkpoint.keep", "checkpoint.keep_best"]),
    ],
)
def test_help_on_some_keys(capsys, words, keys):
    with pytest.raises(SystemExit):
        load_config(["--help", *words])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  (")[0] for line in lines if line and not line.startswith(" ")] == keys


# --- --debug


def test_debug_caps_sizes_and_keeps_smaller_ones(file):
    argv = file(
        "output_dir: runs/x/\nrollout: {prompts_per_step: 64, num_generations: 16, max_completion_length: 1024}\n"
        "optim: {max_steps: 1000, learning_rate: 1e-5}\nlogging: {wandb: online, every: 10}\n"
        "checkpoint: {save_steps: 5, keep_best: eval/mean@8}\nalgorithm: {name: gspo}\n"
        "eval: {num_samples: 8, temperature: 1.0, max_samples: 500}\n"
    )
    config = load_config([*argv, "--debug"])
    r, c = config.rollout, config.checkpoint
    assert (r.prompts_per_step, r.num_generations, r.max_completion_length) == (2, 4, 64)
    assert (config.optim.max_steps, config.eval.num_samples, config.eval.max_samples) == (2, 1, 4)
    assert (config.data.max_train_samples, config.data.max_eval_samples) == (32, 4)
    assert (c.resume, c.save_steps, c.keep_best, config.logging.wandb) == ("never", None, None, "disabled")
    assert config.debug and config.output_dir == "runs/x-debug" and not load_config(argv).debug
    assert (config.optim.learning_rate, config.algorithm.importance_level) == (1e-5, "sequence"), "the config's own"
    smaller = load_config(["--debug", "rollout.num_generations=2", "rollout.max_completion_length=8"])
    assert (smaller.rollout.num_generations, smaller.rollout.max_completion_length) == (2, 8)
    longer = load_config(["--debug", "eval.max_completion_length=100"])
    assert (smaller.eval.max_completion_length, longer.eval.max_completion_length) == (None, 64)
    cut = load_config(["--debug", "algorithm.num_minibatches=4", "rollout.prompts_per_step=16"])
    assert cut.rollout.prompts_per_step == 4
    with pytest.raises(ValueError, match=r"single-process.*2 processes"):
        check_world_size(config, 2)


# --- ranks


@pytest.mark.parametrize(
    ("prompts", "minibatches", "ranks", "works"),
    [(10, 1, 4, "8 or 12"), (3, 1, 8, "8"), (9, 1, 2, "8 or 10"), (6, 3, 4, "12"), (100, 4, 8, "96 or 128")],
)
def test_a_step_that_the_processes_cannot_share_names_what_would_work(prompts, minibatches, ranks, works):
    argv = [f"rollout.prompts_per_step={prompts}", f"algorithm.num_minibatches={minibatches}"]
    with pytest.raises(ValueError, match=rf"prompts_per_step={prompts} is not .*{ranks} processes.*=?{works}$"):
        check_world_size(load_config(argv), ranks)
    for number in works.split(" or "):
        check_world_size(load_config([argv[1], f"rollout.prompts_per_step={number}"]), ranks)


def test_shards_must_divide_the_ranks():
    config = Config(runtime=dict(parallel="fsdp", shard_size=4), rollout=dict(prompts_per_step=24))
    check_world_size(config, 8)
    check_world_size(config, 1)  # trains as under DDP
    check_world_size(load_config(["--debug", "runtime.parallel=fsdp", "runtime.offload=all"]), 1)
    with pytest.raises(ValueError, match="shard_size=4 does not divide 6 processes"):
        check_world_size(config, 6)


def test_what_a_run_from_an_adapter_writes_is_read_again(tmp_path):
    written = load_config([f"model.adapter={tmp_path}"]).for_writing()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    assert load_config([f"--config={tmp_path}/config.yaml"]).for_writing() == written

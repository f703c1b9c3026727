"""Configuration: where a value comes from, what each preset means, and one clear line for each
mistake."""

import ast
import fnmatch
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
    keys_of,
    keys_without_effect,
    load_config,
    make_config,
)
from grpo.config.aliases import OTHER_NAMES


@pytest.fixture
def file(tmp_path):
    """Writes YAML text and returns the arguments that load it."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return ["--config", str(path)]

    return write


def mistakes(argv):
    with pytest.raises((ConfigError, OSError)) as caught:
        load_config(argv)
    return str(caught.value).splitlines()


# --- where a value comes from


def test_defaults_then_file_then_overrides_then_later_overrides(file):
    argv = file("rollout: {top_k: 5, temperature: 0.5, num_generations: 16}\nseed: 1\n")
    config = load_config(
        ["seed=4", *argv, "rollout.temperature=0.7", "seed=2", "rollout={min_p: 0.1}", "seed=3"]
    )
    rollout = {"top_k": 5, "num_generations": 16, "temperature": 0.7, "min_p": 0.1}
    assert config == Config(seed=3, rollout=rollout)
    changed = make_config(argv[1], {"rollout.top_k": 6, "rollout": {"top_p": 0.5}}, {"seed": 2})
    assert changed == Config(
        seed=2, rollout={"top_k": 6, "num_generations": 16, "temperature": 0.5, "top_p": 0.5}
    )
    assert (
        load_config([])
        == Config()
        == load_config(file(""))
        == load_config(file("rollout:\nseed: 0\n"))
    )


def test_the_default_file_is_read_and_named_by_the_first_rank(file, capsys, monkeypatch):
    _, default = file("seed: 5\n")
    assert load_config(["rollout.top_k=3"], default_file=default).seed == 5
    assert capsys.readouterr().out.endswith("/run.yaml, since there is no --config\n")
    monkeypatch.setenv("RANK", "1")
    assert load_config([], default_file=default).seed == 5
    assert capsys.readouterr().out == ""


def test_overrides_are_read_as_yaml(file):
    config = load_config([
        *file("rollout: &sampling {temperature: 0.5}\neval:\n  <<: *sampling\n  max_samples: none\n"),
        "rollout.stop=[\"\\n\", 'Q:']",
        "optim.betas=[0.9, 0.95]",
        "optim.learning_rate=1e-5",
        "algorithm.scale=none",
        "reward.functions=[accuracy, {name: format, weight: 0.5, args: {tag: think}}]",
        "data.few_shot=[{prompt: '2+2', completion: '4'}]",
        "eval={num_samples: 4}",
    ])  # fmt: skip
    assert config == Config(
        rollout={"temperature": 0.5, "stop": ["\n", "Q:"]},
        eval={"temperature": 0.5, "num_samples": 4},
        optim={"betas": (0.9, 0.95), "learning_rate": 1e-5},
        algorithm={"scale": "none"},
        reward={
            "functions": ["accuracy", {"name": "format", "weight": 0.5, "args": {"tag": "think"}}]
        },
        data={"few_shot": [{"prompt": "2+2", "completion": "4"}]},
    )


@pytest.mark.parametrize("text", ["Question: {prompt}", "{prompt}", "{prompt} # now"])
def test_a_text_needs_no_quotes_of_yaml(text):
    assert load_config([f"data.question_template={text}"]).data.question_template == text
    assert load_config([f"data.question_template='{text}'"]).data.question_template == text
    assert (
        load_config(["data.system_prompt=no", "data.answer_pattern=#### (.+)"]).data.system_prompt
        == "no"
    )


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("seed: 7")
    config = load_config(["--config=~/a.yaml", "output_dir=~/runs/x", "model.adapter=~/a"])
    assert (config.seed, config.output_dir) == (7, f"{tmp_path}/runs/x")
    assert config.model.adapter == f"{tmp_path}/a"


# --- presets


PRESET_TABLE = """
    grpo                clip       mean           group  response_mean  token     0.2     0.2     0.04  False
    dr_grpo             clip       mean           none   constant       token     0.2     0.2     0.0   False
    dapo                clip       mean           group  token_mean     token     0.2     0.28    0.0   True
    gspo                clip       mean           group  response_mean  sequence  0.0003  0.0004  0.0   False
    cispo               cispo      mean           group  token_mean     token     0.2     5.0     0.0   False
    maxrl               clip       mean           mean   response_mean  token     0.2     0.2     0.0   False
    gdpo                clip       mean           group  response_mean  token     0.2     0.2     0.0   False
    sapo                sapo       mean           group  response_mean  token     0.2     0.2     0.0   False
    dppo_tv             dppo_tv    mean           none   constant       token     0.15    0.15    0.0   False
    rloo                reinforce  leave_one_out  none   response_mean  token     0.2     0.2     0.0   False
    reinforce           reinforce  none           none   response_mean  token     0.2     0.2     0.0   False
    reinforce_baseline  reinforce  mean           group  response_mean  token     0.2     0.2     0.0   False
"""
"""Name, objective, baseline, scale, aggregation, level, epsilon low and high, beta, dynamic
sampling."""


def test_every_preset_is_what_its_paper_says(file):
    """Written to a file and read again it is the same."""
    found = []
    for name in PRESETS:
        config = load_config([f"algorithm.name={name}"])
        a = config.algorithm
        values = [
            name,
            a.objective,
            a.baseline,
            a.scale,
            a.aggregation,
            a.importance_level,
            a.epsilon,
            a.epsilon if a.epsilon_high is None else a.epsilon_high,
        ]
        found.append([str(value) for value in [*values, a.beta, a.dynamic_sampling]])
        assert (a.kl_estimator, a.delta, a.num_iterations, a.num_minibatches) == ("k3", None, 1, 1)
        assert a.multi_objective_aggregation.startswith("normalize") == (name == "gdpo")
        assert not keys_without_effect(config)
        for written in (config.model_dump(), config.masked_values()):
            assert load_config(file(yaml.safe_dump(written, sort_keys=False))) == config
    assert found == [line.split() for line in PRESET_TABLE.strip().splitlines()]


def test_the_page_gives_the_loss_each_of_its_settings():
    """By name: a forgotten one would silently have its default."""
    page = ast.parse(Path(train_grpo.__file__).read_text())
    calls = [node for node in ast.walk(page) if isinstance(node, ast.Call)]
    (call,) = [c for c in calls if ast.unparse(c.func) == "policy_loss"]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    known = {
        p.name
        for p in inspect.signature(policy_loss).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    assert set(given) == known - {"sapo_temperature_pos", "sapo_temperature_neg"}
    of_batch = {name: f"micro.{name}" for name in given if name.endswith("_BT")}
    others = {
        "objective": "learner.objective",
        "max_length": "learner.max_length",
        "step": "step.number",
    }
    assert given == {name: f"algorithm.{name}" for name in given} | of_batch | others


def test_what_is_set_beats_the_preset_wherever_it_is_set(file):
    in_file = file("algorithm: {beta: 0.1, name: dapo, epsilon_high: 0.3}\n")
    a = load_config([*in_file, "algorithm.aggregation=constant"]).algorithm
    assert (a.beta, a.epsilon_high, a.aggregation, a.dynamic_sampling) == (
        0.1,
        0.3,
        "constant",
        True,
    )
    a = load_config(["algorithm.beta=0.5", "algorithm.name=dr_grpo"]).algorithm
    assert (a.beta, a.scale) == (0.5, "none")
    a = load_config(["algorithm.epsilon=0.3", "algorithm.epsilon_high=0.0"]).algorithm
    assert a.epsilon_high == 0.0
    a = load_config(["algorithm.name=dapo", "algorithm.epsilon_high=null"]).algorithm
    assert (a.epsilon, a.epsilon_high) == (0.2, None)


IMPLIED = """
    -> accuracy | none
    algorithm.name=dapo -> accuracy soft_overlong 512 102 | none
    algorithm.name=dapo reward.functions=[format] rollout.max_completion_length=20 -> format soft_overlong 20 4 | none
    algorithm.name=dapo reward.functions=[soft_overlong] -> soft_overlong | none
    algorithm.name=dapo environment=a.py:A -> | none
    algorithm.name=dapo data.dataset=reasoning_gym:a rollout.engine=vllm -> reasoning_gym soft_overlong 512 102 | token_truncate
    data.dataset=reasoning_gym:a reward.functions=[format] -> format | none
    rollout.engine=vllm algorithm.sampler_correction=none -> accuracy | none
    rollout.engine=vllm algorithm.sampler_correction=sequence_mask -> accuracy | sequence_mask
    rollout.engine=vllm algorithm.objective=dppo_tv -> accuracy | none
    rollout.engine=vllm algorithm.name=dppo_tv algorithm.objective=clip -> accuracy | token_truncate
"""
"""Arguments -> rewards with their arguments | sampler correction. The paper's proportion of the
punishment, 4,096 of 20,480 tokens, is a fifth."""


@pytest.mark.parametrize("line", IMPLIED.strip().splitlines())
def test_what_follows_from_other_keys_unless_it_is_set(line):
    argv, expected = line.split("->")
    config = load_config(argv.split())
    found = []
    for function in config.reward.functions:
        found += [function.name, *map(str, function.args.values())]
    correction = config.algorithm.sampler_correction
    assert [*found, "|", correction] == expected.split()
    assert config.eval.correct_above == (0.99 if "reasoning_gym" in found else 0.0)
    assert config.data.dataset.startswith("environment:") == (config.environment is not None)
    assert make_config(config.model_dump()) == config, "as written to config.yaml"
    assert not config.algorithm.model_fields_set - {"name", "objective", "sampler_correction"}


# --- mistakes


def test_the_names_from_elsewhere_are_no_keys_and_lead_to_keys():
    known = set(keys_of(Config))
    sections = {"model", "lora", "optim"}
    assert OTHER_NAMES.keys() & {*Config.model_fields} == sections
    ends = [key.rpartition(".")[2] for key in known]
    for name, meant in OTHER_NAMES.items():
        key, _, note = meant.partition("; ")
        assert key in known or " " in key, meant
        # A name that is a key, too, is listed for its note alone.
        for end in fnmatch.filter(ends, name):
            assert key.rpartition(".")[2] == end and note, name


MISTAKES = r"""
    rollout.num_generation=1 -> unknown key 'rollout.num_generation'; did you mean 'rollout.num_generations'?
    optim.temperature=1 -> did you mean 'rollout.temperature'?
    evel=1 -> did you mean 'eval'?
    beta=1 -> did you mean 'algorithm.beta'?
    output_dri=1 -> did you mean 'output_dir'?
    optim.lr=1 -> did you mean 'optim.learning_rate'?
    eval.every_steps=1 -> did you mean 'eval.every'?
    checkpoint.every=1 -> did you mean 'checkpoint.save_steps'?
    model.name=1 -> did you mean 'model.name_or_path'?
    vllm_server_timeout=1 -> did you mean 'runtime.timeout_s'?
    torch_compile=1 -> unknown key 'torch_compile': no counterpart; not supported
    dataloader_num_workers=4 -> unknown key 'dataloader_num_workers': no counterpart; prompts are tokenized once
    save_total_limit=3 -> unknown key 'save_total_limit'; did you mean 'checkpoint.keep'? a large number keeps all
    max_steps=3 -> unknown key 'max_steps'; did you mean 'optim.max_steps'? it counts rollouts, TRL's counts updates
    no_cuda=true -> unknown key 'no_cuda'; did you mean 'runtime.device'? its value is cpu
    quick_brown_fox=1 -> unknown key 'quick_brown_fox'; known are those of --help
    optim.fox=1 -> unknown key 'optim.fox'; known are optim.name, optim.learning_rate
    rollout.top_p=1.5 -> rollout.top_p=1.5: input should be less than or equal to 1
    rollout.temperature=0 -> rollout.temperature=0: input should be greater than 0
    optim.learning_rate=fast -> optim.learning_rate='fast': input should be a valid number
    optim.learning_rate=.nan -> finite
    seed=-1 -> seed=-1: input
    algorithm.name=ppo -> 'grpo', 'dr_grpo', 'dapo'
    algorithm.objective=ppo -> clip|cispo|
    reward.functions=accuracy -> list
    rollout.top_k=none -> integer
    lora.rank=true -> not true or false
    data.question_template=x -> {prompt
    rollout.server=[] -> http://host
    rollout.server=http://me:pass@host:8000 -> a password is a secret
    rollout.vllm_command=vllm serve {name} -> {model
    rollout.vllm_command=env HF_TOKEN=hf vllm serve {model} -> rollout.vllm_command: HF_TOKEN is a secret
    model=someone/model -> model is a section: model.name_or_path names the model: a Hub id or a folder;
    data=3 -> data is a section: it has several keys; write data.KEY=VALUE
    optim=3 & optim.max_steps=1 -> optim is a section
    reward.functions=[{name: accuracy, wieght: 2}] -> unknown key 'reward.functions.0.wieght'
    reward.functions={name: judge, args: {api_key: sk-1}} -> 'api_key': '***'
    optim.betas=[0.9, 1] -> optim.betas.1=1
    data.few_shot=[{prompt: a}] -> data.few_shot.0.completion=
    data.few_shot=[{ -> data.few_shot=: not valid YAML
    --config & nowhere.yaml -> there is no file nowhere.yaml
    output_dir= -> output_dir='': string should have at least 1 character
    checkpoint.keep_last=1 -> did you mean 'checkpoint.keep'?
    --seed -> '--seed' is not understood: use section.key=value, --config FILE, --debug or --help; did you mean 'seed'?
    --learning_rate=1 -> unknown key 'learning_rate'; did you mean 'optim.learning_rate'?
    rollout.num_generations=1 -> num_generations >= 2, or algorithm.baseline=none
    reward.functions=[] -> give at least 1
    algorithm.name=dppo_tv & algorithm.importance_level=sequence -> importance_level=token
    algorithm.name=rloo & algorithm.num_iterations=2 -> use objective=clip, or num_iterations=1
    algorithm.sampler_correction=geometric_mask -> sampler_correction_max=1.01
    algorithm.sampler_correction=token_mask & algorithm.sampler_correction_min=1.5 -> must lie around 1
    optim.min_lr=1e-2 & optim.lr_scheduler_type=cosine -> is above optim.learning_rate
    optim.min_lr=1e-7 -> optim.min_lr needs lr_scheduler_type=cosine, got constant
    data.prompt_template={prompt} & data.system_prompt=a -> data.prompt_template takes no system_prompt
    runtime.offload=all -> runtime.parallel=fsdp
    lora.rank=8 & algorithm.ref_sync_steps=2 & algorithm.ref_sync_alpha=0.5 -> ref_sync_alpha must be 1
"""
"""Arguments -> a part of the message."""


@pytest.mark.parametrize("case", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_that_names_what_would_work(case):
    argv, said = case.strip().split(" -> ")
    (line,) = mistakes(argv.split(" & "))
    assert said in line.replace("\\", "")
    assert "pass@" not in line and "=hf " not in line and "sk-1" not in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\noutput_dir: x\nseed: 2\n",
            "key 'seed' is there twice in \"<unicode string>\", line 3",
        ),
        ("seed: 1\nrollout: [1\n", "line 3"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_a_file_that_is_not_right_is_named(file, text, message):
    argv = file(text)
    (only,) = mistakes(argv)
    assert only.startswith(f"{argv[1]}: ") and message in only


def test_every_mistake_is_reported_at_once(file):
    lines = mistakes(file("rollout: {top_p: 1.5, top_k: -1}\nseed: x\noptim: {learning_rat: 1}\n"))
    assert len(lines) == 4


DEFAULTS_THAT_HOLD = """
seed: 0
model: {attn_implementation: sdpa, gradient_checkpointing: false, disable_dropout: true, trust_remote_code: false}
data: {max_prompt_length: 512, chat_template_kwargs: {}}
reward: {timeout_s: 10}
rollout: {prompts_per_step: 8, num_generations: 8, max_completion_length: 512, temperature: 1.0, top_p: 1.0, top_k: 0}
algorithm: {name: grpo, epsilon: 0.2, beta: 0.04, kl_estimator: k3, num_iterations: 1, num_minibatches: 1}
optim: {learning_rate: 1.0e-6, max_grad_norm: 1.0}
eval: {num_samples: 1, before_training: true, temperature: 0.0, max_completion_length: null}
checkpoint: {keep: 2, resume: auto}
logging: {wandb: disabled, log_completions: 4, every: 1}
runtime: {device: auto, precision: bf16, deterministic: false, parallel: ddp}
"""


def test_the_keys_that_hold_and_their_number():
    defaults = yaml.safe_load(DEFAULTS_THAT_HOLD)
    assert make_config(defaults) == Config()
    assert len(keys_of(Config)) <= 127


# --- help, --debug, ranks


def test_help_lists_every_key_with_type_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0 and lines[0].startswith("usage: ")
    for key in keys_of(Config):
        (number,) = [n for n, line in enumerate(lines) if line.startswith(f"{key}  (")]
        assert "; default " in lines[number] and lines[number].endswith(")")
        assert lines[number + 1].startswith("    ") and len(lines[number + 1].split()) >= 2, key
    for line in (
        "rollout.temperature  (float; default 1.0)",
        "algorithm.epsilon_high  (float | none; default none)",
        "data.conversational  (auto | true | false; default auto)",
        "optim.betas  (tuple[float, float]; default [0.9, 0.999])",
        "reward.functions  (list[RewardFunction]; default [{args: {}, name: accuracy, weight: 1.0}])",
    ):
        assert line in lines


def test_help_on_some_keys(capsys):
    with pytest.raises(SystemExit):
        load_config(["--help", "keep", "seed"])
    lines = capsys.readouterr().out.splitlines()
    found = [line.split("  (")[0] for line in lines if not line.startswith(" ")]
    assert found == ["seed", "checkpoint.keep", "checkpoint.keep_best"]
    with pytest.raises(ValueError, match="did you mean 'algorithm"):
        load_config(["--help", "kl_coef"])


def test_debug_caps_sizes_and_keeps_smaller_ones(file):
    argv = file(
        "output_dir: runs/x/\nrollout: {prompts_per_step: 64, num_generations: 16, max_completion_length: 8}\n"
        "optim: {max_steps: 1000, learning_rate: 1e-5}\nlogging: {wandb: online, every: 10}\n"
        "checkpoint: {save_steps: 5, keep_best: eval/mean@8}\nalgorithm: {name: gspo}\n"
        "eval: {num_samples: 8, temperature: 1.0, max_completion_length: 100}\n"
    )
    config = load_config([*argv, "--debug"])
    expected = {
        "output_dir": "runs/x-debug",
        "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8},
        "optim": {"max_steps": 2, "learning_rate": 1e-5},
        "eval": {"num_samples": 1, "temperature": 1.0, "max_samples": 4, "before_training": False},
        "data": {"max_train_samples": 32, "max_eval_samples": 4},
        "checkpoint": {"resume": "never"},
        "algorithm": {"name": "gspo"},
    }
    assert make_config(config.model_dump()) == make_config(expected)
    assert config.debug and not load_config(argv).debug
    cut = load_config(["--debug", "algorithm.num_minibatches=4", "rollout.prompts_per_step=16"])
    assert cut.rollout.prompts_per_step == 4
    turns = load_config(["--debug", "tools=[calculator]", "rollout.max_completion_length=200"])
    assert turns.rollout.max_completion_length == 200, "the room of all turns"
    with pytest.raises(ValueError, match=r"single-process.*2 processes"):
        check_world_size(config, 2)


@pytest.mark.parametrize(
    ("prompts", "minibatches", "ranks", "works"),
    [(10, 1, 4, 12), (3, 1, 8, 8), (6, 3, 4, 12), (100, 4, 8, 128)],
)
def test_a_step_that_the_processes_cannot_share_names_what_would_work(
    prompts, minibatches, ranks, works
):
    argv = [f"rollout.prompts_per_step={prompts}", f"algorithm.num_minibatches={minibatches}"]
    with pytest.raises(
        ValueError, match=rf"prompts_per_step={prompts} is not .*{ranks} processes.*={works}$"
    ):
        check_world_size(load_config(argv), ranks)
    check_world_size(load_config([argv[1], f"rollout.prompts_per_step={works}"]), ranks)


def test_shards_must_divide_the_ranks():
    config = Config(runtime=dict(parallel="fsdp", shard_size=4), rollout=dict(prompts_per_step=24))
    check_world_size(config, 8)
    check_world_size(config, 1)  # trains as under DDP
    check_world_size(load_config(["--debug", "runtime.parallel=fsdp", "runtime.offload=all"]), 1)
    with pytest.raises(ValueError, match="shard_size=4 does not divide 6 processes"):
        check_world_size(config, 6)

"""examples/yaml_from_trl.py: TRL scripts, and the configurations that it prints for them."""

import re
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, environment_of_runs
from datasets import Dataset

pytestmark = pytest.mark.slow

BEGINNING = """
import functools
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def my_reward(completions, **columns):
    return [0.0 for _ in completions]

dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "1 + 1 ="}]}])
"""


def translated(folder, script, *arguments, options=()):
    """Return the values that the program prints for a script, and its lines of what is left."""
    pytest.importorskip("trl", reason="needs TRL: pip install -e '.[bench]'")
    file = folder / "train.py"
    file.write_text(BEGINNING + script)
    program = ROOT / "examples" / "yaml_from_trl.py"
    text = subprocess.run(
        [sys.executable, program, *options, file, *arguments],
        env=environment_of_runs({"PYTHONPATH": str(ROOT)}),
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    left = re.findall(r"^# TO DO: (.*)$", text, re.MULTILINE)
    return yaml.safe_load(text), left


def test_the_smallest_script_is_the_yaml_of_the_page(tmp_path):
    page = (ROOT / "docs" / "from_trl.md").read_text()
    blocks = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    script = next(block for block in blocks if block.startswith("# TRL"))
    expected = yaml.safe_load(next(block for block in blocks if block.startswith("# here")))

    values, _ = translated(tmp_path, script)
    # Its rows are a file, and its function has a name of its own.
    for section in ("data", "reward"):
        del values[section], expected[section]
    # The default is printed, as TRL's is another one for some losses.
    assert values["algorithm"].pop("scale") == "group"
    assert values == expected


def test_settings_that_count_or_have_another_form(tmp_path):
    script = """
from peft import LoraConfig

args = GRPOConfig(
    output_dir="runs/x",
    max_completion_length=300,
    temperature=0.9,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    steps_per_generation=16,
    num_iterations=2,
    num_generations=8,
    max_steps=100,
    eval_strategy="steps",
    eval_steps=20,
    save_strategy="no",
    scale_rewards=False,
    max_grad_norm=0.0,
    epsilon_high=0.28,
    adam_beta2=0.99,
    optim="adamw_8bit",
    report_to=["wandb"],
    reward_weights=[1.0, 0.5],
    warmup_ratio=0.1,
    overwrite_output_dir=True,
    entropy_coef=0.1,
)
GRPOTrainer(
    "Qwen/Qwen2.5-0.5B-Instruct",
    [my_reward, functools.partial(my_reward, limit=3)],
    args,
    dataset,
    peft_config=LoraConfig(r=4, lora_alpha=6, target_modules=["v_proj", "q_proj"], lora_dropout=0.1),
)
"""
    values, left = translated(tmp_path, script)
    # 4 completions x 16 passes are 64 completions, 8 problems, in 2 x 2 updates of 8 passes each.
    assert values["rollout"] == {
        "prompts_per_step": 8,
        "num_generations": 8,
        "max_completion_length": 300,
        "temperature": 0.9,
    }
    assert values["algorithm"] == {
        "scale": "none",
        "aggregation": "token_mean",
        "epsilon_high": 0.28,
        "beta": 0,
        "num_iterations": 2,
        "num_minibatches": 2,
    }
    assert values["optim"] == {
        "name": "adamw8bit",
        "betas": [0.9, 0.99],
        "max_grad_norm": 1_000_000_000,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.1,
        "max_steps": 25,
        "num_epochs": 3,
    }
    assert values["eval"] == {"before_training": False, "every": 5}
    assert "checkpoint" not in values
    assert values["logging"] == {"wandb": "online"}
    assert values["lora"] == {
        "rank": 4,
        "alpha": 6,
        "dropout": 0.1,
        "target_modules": ["q_proj", "v_proj"],
    }
    assert values["model"]["disable_dropout"] is False
    assert values["reward"]["functions"] == [
        {"name": "my_functions.py:my_reward", "weight": 1.0},
        {"name": "my_functions.py:my_reward", "args": {"limit": 3}, "weight": 0.5},
    ]
    # A name that TRL has removed, and one without a counterpart.
    assert "overwrite_output_dir=True: checkpoint.resume=never starts again" in left
    assert any(line.startswith("entropy_coef=0.1: no counterpart") for line in left)


def test_a_script_with_trls_parser(tmp_path):
    """The parser gives all settings: those that the command line leaves out are not printed."""
    script = """
from trl import ModelConfig, ScriptArguments, TrlParser
from trl.rewards import think_format_reward

if __name__ == "__main__":
    _, args, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    args.temperature = 0.7
    GRPOConfig("runs/another", top_p=0.5)
    texts = Dataset.from_list([{"prompt": "1 + 1 ="}])
    GRPOTrainer(model.model_name_or_path, think_format_reward, args, texts)
"""
    command_line = ["--model_name_or_path=FOLDER", "--learning_rate=1e-5", "--loss_type=luspo"]
    values, left = translated(tmp_path, script, *command_line)
    assert values["optim"]["learning_rate"] == 1e-5
    # Changed after the parser, and of another configuration.
    assert values["rollout"]["temperature"] == 0.7 and "top_p" not in values["rollout"]
    assert values["model"] == {"name_or_path": "FOLDER", "gradient_checkpointing": True}
    assert values["data"] == {"dataset": "data/train/train", "prompt_template": "{prompt}"}
    name = "trl.rewards.format_rewards:think_format_reward"
    assert values["reward"]["functions"] == [{"name": name}]
    assert any("luspo" in line for line in left), left


def test_several_gpus_and_saved_rows(tmp_path):
    """4 completions on each of 4 GPUs are 2 problems of 8, which one GPU could not have. 7 rows are
    3 steps."""
    script = """
if __name__ == "__main__":
    long = Dataset.from_list([{"prompt": "x" * 1200}] * 7)
    args = GRPOConfig("runs/x", per_device_train_batch_size=4, save_strategy="epoch")
    GRPOTrainer("FOLDER", my_reward, args, train_dataset=long)
"""
    values, left = translated(tmp_path, script, options=("--gpus=4", "--save-rows"))
    assert values["rollout"] == {"prompts_per_step": 2}
    assert values["checkpoint"] == {"save_steps": 3, "keep": 1000}
    assert values["reward"]["functions"] == [{"name": "train.py:my_reward"}]
    rows = Dataset.load_from_disk(tmp_path / values["data"]["dataset"])
    assert rows["prompt"][0] == "x" * 1200
    (line,) = left
    assert "the longest has 1200 characters" in line


@pytest.mark.parametrize(
    ("settings", "expected", "left"),
    [
        ({"optim": "adafactor"}, {"optim.name": None}, "optim='adafactor'"),
        ({"optim": "lion_8bit"}, {"optim.name": None}, "optim='lion_8bit'"),
        ({"optim": "paged_adamw_8bit"}, {"optim.name": "adamw8bit"}, None),
        ({"optim": "adamw_torch"}, {"optim.name": None}, None),
        ({"loss_type": "cispo"}, {"algorithm.epsilon_high": None}, "capped at 0.2"),
        ({"loss_type": "cispo", "epsilon_high": 4.0}, {"algorithm.epsilon_high": 3}, None),
        ({"loss_type": "bnpo"}, {"algorithm.aggregation": "token_mean"}, None),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, {}, "over a micro-batch"),
        ({"loss_type": "vespo"}, {}, "vespo"),
        ({"eval_steps": 0.1, "max_steps": 100}, {"eval.every": 10}, None),
        ({"eval_steps": 0.1}, {"eval.every": None}, "eval_steps: eval.every is a number"),
        ({"save_steps": 0.2, "max_steps": 10}, {"checkpoint.save_steps": 2}, None),
        ({"save_strategy": "epoch"}, {"checkpoint.keep": 1000}, "save_strategy='epoch'"),
        ({"eval_strategy": "epoch"}, {"eval.before_training": False}, "eval_strategy='epoch'"),
        ({"repetition_penalty": 1.05}, {}, "repetition_penalty=1.05: no counterpart"),
        ({"repetition_penalty": 1.0}, {}, None),
        ({"dataloader_num_workers": 2, "logging_first_step": True}, {}, None),
        ({"report_to": ["mlflow"]}, {"logging.mlflow": None}, "report_to='mlflow'"),
        ({"generation_kwargs": {"stop_strings": "END"}}, {"rollout.stop": ["END"]}, None),
        ({"generation_kwargs": {"min_p": 0.1, "do_sample": True}}, {"rollout.min_p": 0.1}, None),
        ({"max_completion_length": None}, {}, "max_completion_length=None"),
        (
            {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}},
            {"model.attn_implementation": "eager"},
            None,
        ),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.25},
                "learning_rate": 4e-6,
            },
            {"optim.min_lr": 1e-6},
            None,
        ),
        ({"mask_truncated_completions": True, "loss_type": "dr_grpo"}, {}, None),
        ({"mask_truncated_completions": True, "loss_type": "grpo"}, {}, "the average differs"),
        ({"generation_batch_size": 32}, {"rollout.prompts_per_step": 4}, None),
        ({"disable_dropout": True}, {}, None),
        ({"logging_steps": 4, "num_iterations": 2}, {"logging.every": 2}, None),
        ({"logging_steps": 1, "num_iterations": 2}, {"logging.every": None}, None),  # the default
        (
            {"max_steps": 10, "num_iterations": 4},
            {"optim.max_steps": 3},
            "10 updates are no whole number of rollouts; 3 rollouts are 12 updates",
        ),
        (
            {"steps_per_generation": 4, "gradient_accumulation_steps": 8, "num_iterations": 2},
            {},
            "the same completions more than once",
        ),
    ],
)
def test_no_setting_is_lost_without_a_word(settings, expected, left):
    """Either a key or a line for a person has it. None: the key is not there."""
    pytest.importorskip("trl", reason="needs TRL: pip install -e '.[bench]'")
    from trl import GRPOConfig

    from examples import yaml_from_trl

    if "eval_steps" in settings:
        settings = settings | {"eval_strategy": "steps"}
    args = GRPOConfig("runs/x", use_cpu=True, bf16=False, **settings)
    found = yaml_from_trl.Translation()
    yaml_from_trl.add_settings(found, args, settings)
    try:
        yaml_from_trl.make_config(found.keys)
    except ValueError as error:
        found.left.append(str(error))
    for key, value in expected.items():
        assert found.keys.get(key) == value
    if left is None:
        assert found.left == []
    else:
        (line,) = found.left
        assert left in line


def test_the_reward_that_decides_what_is_correct(tmp_path):
    """TRL's accuracy_reward, also where it is not the first. Without one, a person has to say."""
    script = """
from trl.rewards import accuracy_reward

def another(completions, **columns):
    return [1.0 for _ in completions]

if __name__ == "__main__":
    args = GRPOConfig("runs/x", eval_strategy="steps", eval_steps=5)
    rewards = [my_reward, REWARD]
    GRPOTrainer("FOLDER", rewards, args, train_dataset=dataset, eval_dataset=dataset)
"""
    for reward, expected in [("accuracy_reward", "accuracy_reward"), ("another", None)]:
        values, left = translated(tmp_path, script.replace("REWARD", reward))
        assert values["eval"].get("correctness") == expected
        assert any("right what train.py:my_reward gives" in line for line in left) != bool(expected)


def test_lora_and_rewards_of_trl(tmp_path, random_model):
    """peft chooses two layers of this architecture. A lambda has no name, and keeps its weight."""
    pytest.importorskip("trl", reason="needs TRL: pip install -e '.[bench]'")
    from peft import LoraConfig
    from trl import GRPOConfig
    from trl.rewards import get_soft_overlong_punishment

    from examples import yaml_from_trl

    args = GRPOConfig("runs/x", use_cpu=True, bf16=False, reward_weights=[1.0, 0.2, 0.1])
    found = yaml_from_trl.Translation()
    arguments = {
        "eval_dataset": [],
        "model": str(random_model),
        "reward_funcs": [
            lambda completions: [0.0],
            "org/reward-model",
            get_soft_overlong_punishment(100, 20),
        ],
        "peft_config": LoraConfig(r=4, bias="all"),
    }
    yaml_from_trl.add_arguments(found, arguments, args, tmp_path / "train.py")
    assert "data.eval_dataset" not in found.keys
    assert found.keys["lora.target_modules"] == ["q_proj", "v_proj"]
    assert found.keys["reward.functions"] == [
        {"name": "my_functions.py:reward_0", "weight": 1.0},
        {"name": "my_functions.py:reward_1", "weight": 0.2},
        {
            "name": "soft_overlong",
            "args": {"max_length": 100, "cache_length": 20},
            "weight": 0.1,
        },
    ]
    assert "LoraConfig bias='all': no counterpart; biases are not trained" in found.left
    assert sum("write a function for" in line for line in found.left) == 2
    assert not any("move the script's functions" in line for line in found.left)
    found = yaml_from_trl.Translation()
    yaml_from_trl.add_lora(found, LoraConfig(r=4), str(tmp_path / "missing"))
    assert found.left == ["lora.target_modules: all linear layers; peft takes some of them"]


def test_an_object_as_model_a_trainer_of_ones_own_and_arguments_by_position(tmp_path, random_model):
    """What the values of GRPOConfig do not say: each is a key, or a line of what is left."""
    pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    script = f"""
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

class MyTrainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return 0.0

def scaled(scale=1.0, completions=None, trainer_state=None, **columns):
    return [scale for _ in completions]

model = AutoModelForCausalLM.from_pretrained({str(random_model)!r})
adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
MyTrainer(adapted, functools.partial(scaled, 5.0), GRPOConfig("runs/x"), train_dataset=dataset)
"""
    values, left = translated(tmp_path, script)
    assert values["model"]["name_or_path"] == str(random_model)
    assert values["lora"] == {"rank": 4, "alpha": 8, "target_modules": ["q_proj"]}
    (reward,) = values["reward"]["functions"]
    assert reward["args"] == {"scale": 5.0}
    text = "\n".join(left)
    assert "model: the script passes an object" in text
    assert "lora: of the adapter 'default'" in text
    assert "MyTrainer has its own _compute_loss: a loss" in text
    assert "scaled: trainer_state.global_step counts rollouts" in text


def test_a_name_that_trl_has_removed_and_rewards_of_the_script(tmp_path):
    script = """
args = GRPOConfig("runs/x", warmup_ratio=0.1)
if __name__ == "__main__":
    GRPOTrainer("m", my_reward, args, train_dataset=dataset)
"""
    values, left = translated(tmp_path, script)
    assert values["optim"]["warmup_steps"] == 0.1
    assert any("has no warmup_ratio, so an import" in line for line in left)


def test_a_script_that_only_guards_its_training(tmp_path):
    """An import would make the trainer, and load the model, in each worker."""
    from examples.yaml_from_trl import is_guarded

    file = tmp_path / "train.py"
    guard = 'if __name__ == "__main__":\n    '
    for script, expected in [
        (f"{guard}GRPOTrainer(m).train()", True),
        (f"def main():\n    GRPOTrainer(m).train()\n{guard}main()", True),
        (f"trainer = GRPOTrainer(m)\n{guard}trainer.train()", False),
        ("GRPOTrainer(m).train()", False),
    ]:
        file.write_text(script)
        assert is_guarded(file) == expected, script

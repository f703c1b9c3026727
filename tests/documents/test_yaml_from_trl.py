"""examples/yaml_from_trl.py: TRL scripts, and the configurations that it prints for them."""

import re
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, environment_of_runs

pytestmark = pytest.mark.slow

BEGINNING = """
import functools
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def my_reward(completions, **columns):
    return [0.0 for _ in completions]

dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "1 + 1 ="}]}])
"""


def translated(folder, script, *arguments):
    """Return the values that the program prints for a script, and its lines of what is left."""
    pytest.importorskip("trl", reason="needs TRL: pip install -e '.[bench]'")
    file = folder / "train.py"
    file.write_text(BEGINNING + script)
    program = ROOT / "examples" / "yaml_from_trl.py"
    text = subprocess.run(
        [sys.executable, program, file, *arguments],
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
        "max_steps": 25,
        "num_epochs": 3,
    }
    assert values["eval"] == {"every": 5}
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
    # A removed name, and one without a counterpart.
    assert "warmup_ratio=0.1: optim.warmup_steps; a number below 1 is a fraction" in left
    assert any(line.startswith("entropy_coef=0.1: no counterpart") for line in left)


def test_a_script_with_trls_parser(tmp_path):
    """The parser gives all settings: those that the command line leaves out are not printed."""
    script = """
from trl import ModelConfig, ScriptArguments, TrlParser
from trl.rewards import think_format_reward

if __name__ == "__main__":
    _, args, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    texts = Dataset.from_list([{"prompt": "1 + 1 ="}])
    GRPOTrainer(model.model_name_or_path, think_format_reward, args, texts)
"""
    command_line = ["--model_name_or_path=FOLDER", "--learning_rate=1e-5", "--loss_type=luspo"]
    values, left = translated(tmp_path, script, *command_line)
    assert values["optim"]["learning_rate"] == 1e-5
    assert values["model"] == {"name_or_path": "FOLDER", "gradient_checkpointing": True}
    assert values["data"] == {"dataset": "data/train", "prompt_template": "{prompt}"}
    name = "trl.rewards.format_rewards:think_format_reward"
    assert values["reward"]["functions"] == [{"name": name}]
    assert any("luspo" in line for line in left), left

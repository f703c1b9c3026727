"""``python -m grpo.chat``: a conversation, and samples of one prompt with their rewards."""

import io
import re
import shutil

import pytest
from conftest import run_trainer, small_run
from transformers import MambaConfig, MambaForCausalLM

from grpo.commands.chat import main, printable


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, random_model):
    folder = tmp_path_factory.mktemp("chat") / "run"
    run_trainer(*small_run(random_model, folder), "optim.max_steps=1", "eval.before_training=false")
    return folder / "checkpoint-1"


@pytest.fixture
def chat(monkeypatch, capsys):
    def run(*arguments, text=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_samples_of_a_prompt_with_the_rewards_of_its_run(checkpoint, chat):
    arguments = ("--model", checkpoint, "--prompt", "2+2=", "--samples", "3")
    code, shown, _ = chat(*arguments)
    assert code == 0
    heads = re.findall(
        r"^--- \d/3  reward (\S+) \(share_of_digits (\S+)\), (\d+) tokens, (?:finished|truncated)$", shown, re.M
    )
    assert len(heads) == 3
    assert all(total == part and 1 <= int(length) <= 12 for total, part, length in heads)
    assert chat(*arguments)[1] == shown, "seeded"
    assert chat(*arguments, "--seed", "1")[1] != shown


def test_a_conversation_goes_on_until_it_is_too_long_or_ended(checkpoint, chat):
    greedy = ("--model", checkpoint, "--temperature", "0")
    code, once, _ = chat(*greedy, text="2+2=\n")
    assert code == 0 and once
    assert chat(*greedy, text="2+2=\n\n/reset\n2+2=\n/quit\nnever read\n")[1] == once * 2, "greedy, and begun anew"
    code, shown, _ = chat("--model", checkpoint, "--max-tokens", "100", text=f"{'1+' * 30}\n{'2+' * 30}\n")
    assert code == 0 and "a new one starts with this turn" in shown


def test_user_errors_are_one_line(checkpoint, random_model, chat):
    cases = {
        ("--model", "/nowhere"): "/nowhere cannot be loaded",
        ("--model", random_model, "--prompt", "2+2=", "--max-tokens", "256"): "256 completion tokens leave no space",
        (
            "--model",
            random_model,
            "--prompt",
            "2+2=",
            "--max-tokens",
            "8",
            "--column",
            "other=1",
        ): "column(s) answer",  # the default reward reads it
        ("--model", checkpoint, "--prompt", "2", "--column", "answer"): "--column answer: use NAME=VALUE",
    }
    for arguments, words in cases.items():
        code, _, complaint = chat(*arguments)
        assert code == 2
        assert complaint.startswith("error: ") and words in complaint and complaint.count("\n") == 1


@pytest.mark.slow
def test_a_model_without_a_run_gets_the_prompt_alone(random_model, chat, tmp_path):
    """No rewards, and completions that fit into the model's context, also of a base model without a chat template."""
    base = tmp_path / "base"
    shutil.copytree(random_model, base, ignore=shutil.ignore_patterns("*.jinja"))
    for model in (random_model, base):
        code, shown, _ = chat("--model", model, "--prompt", "2+2=", "--samples", "2", "rollout.temperature=0.01")
        heads = re.findall(r"^--- \d/2  (\d+) tokens, (?:finished|truncated)$", shown, re.M)
        assert code == 0 and len(heads) == 2 and all(int(length) <= 128 for length in heads)


def test_the_configuration_beside_a_checkpoint_is_that_of_its_run(checkpoint, chat, tmp_path):
    """Also without the trainer's state, in a folder that was moved; ``section.key=value`` changes it."""
    run = tmp_path / "moved"
    shutil.copytree(checkpoint.parent, run)
    shutil.rmtree(run / "checkpoint-1" / "trainer")
    arguments = ("--prompt", "2+2=", "--samples", "2")
    expected = chat("--model", checkpoint, *arguments)[1]
    assert "share_of_digits" in expected
    assert chat("--model", run / "checkpoint-1", *arguments)[1] == expected
    shown = chat("--model", run / "checkpoint-1", *arguments, "rollout.max_completion_length=2")[1]
    assert {int(length) for length in re.findall(r"(\d+) tokens", shown)} <= {1, 2}
    (run / "checkpoint-1" / "trainer").mkdir()
    (run / "checkpoint-1" / "trainer" / "state.json").write_text('{"step": 1')
    code, _, said = chat("--model", run / "checkpoint-1", *arguments)
    assert code == 2 and "state.json holds no configuration that can be read" in said


def test_control_characters_of_a_model_are_escaped():
    assert printable("a\x1b[2Jb\u202e\r\n\t1") == "a\\u001b[2Jb\\u202e\\u000d\n\t1"


def test_a_completion_that_nothing_could_score_has_no_reward(tmp_path, random_model, chat):
    from conftest import ROOT

    config = tmp_path / "run.yaml"
    config.write_text(f"reward: {{functions: ['{ROOT}/tests/rewards_for_tests.py:unscorable']}}\n")
    shown = chat("--model", random_model, "--config", config, "--prompt", "2+2=", "--max-tokens", "12")[1]
    heads = set(re.findall(r"reward (\S+) \(unscorable (\S+)\)", shown))
    assert heads == {("unscorable", "unscorable"), ("1", "1")}, shown


def test_a_model_without_sdpa_needs_the_runs_configuration(tmp_path, random_model, chat):
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder, ignore=lambda *_: ["config.json", "generation_config.json"])
    sizes = dict(vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=8, eos_token_id=2)
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(folder)
    arguments = ("--model", folder, "--max-tokens", "4")
    code, _, said = chat(*arguments, text="2+2=\n")
    assert code == 2 and 'attn_implementation="eager"' in said
    (tmp_path / "run.yaml").write_text("model: {attn_implementation: eager}\n")
    assert chat(*arguments, "--config", tmp_path / "run.yaml", text="2+2=\n")[0] == 0

"""``python -m grpo.chat``: a conversation, and samples of one prompt with their rewards."""

import io
import re
import shutil

import pytest
from conftest import ROOT, run_trainer, small_run

from grpo.commands.chat import main

SAMPLE = ("--prompt", "2+2=", "--samples", "3")
SHORT = "rollout.max_completion_length=12"


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
    code, shown, _ = chat("--model", checkpoint, *SAMPLE)
    assert code == 0
    head = r"^--- \d/3  reward (\S+) \(share_of_digits (\S+)\), (\d+) tokens, (?:finished|truncated)$"
    heads = re.findall(head, shown, re.M)
    assert len(heads) == 3
    assert all(total == part and 1 <= int(length) <= 12 for total, part, length in heads)
    assert chat("--model", checkpoint, *SAMPLE)[1] == shown, "seeded"
    assert chat("--model", checkpoint, *SAMPLE, "seed=1")[1] != shown


def test_a_conversation_goes_on_until_it_is_ended_or_too_long(checkpoint, chat):
    greedy = ("--model", checkpoint, "--temperature", "0")
    code, once, _ = chat(*greedy, text="2+2=\n")
    assert code == 0 and once
    assert chat(*greedy, text="2+2=\n\n/reset\n2+2=\n/quit\nnever read\n")[1] == once * 2, "greedy, and begun anew"
    code, _, said = chat(*greedy, text=f"{'1+' * 60}\n{'2+' * 60}\n")
    assert code == 2 and "the chat (context of 256 tokens" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere"], "/nowhere cannot be loaded"),
        (["--model", "MODEL", *SAMPLE, SHORT, "--column", "other=1"], "needs the column(s) answer"),
        (["--model", "MODEL", *SAMPLE, "rollout.engine=vllm", "--column", "other=1"], "needs the column(s) answer"),
        (["--model", "MODEL", *SAMPLE, "--column", "answer"], "--column answer: use NAME=VALUE"),
    ],
)
def test_user_errors_are_one_line(random_model, chat, arguments, words):
    """The default reward reads the column ``answer``."""
    code, _, said = chat(*(str(random_model) if word == "MODEL" else word for word in arguments))
    assert code == 2
    assert said.startswith("error: ") and words in said and said.count("\n") == 1


def test_a_model_without_a_run_gets_the_prompt_alone(random_model, chat, tmp_path):
    """No rewards, also of a base model without a chat template."""
    base = tmp_path / "base"
    shutil.copytree(random_model, base, ignore=shutil.ignore_patterns("*.jinja"))
    for model in (random_model, base):
        code, shown, _ = chat("--model", model, *SAMPLE, SHORT)
        assert code == 0 and len(re.findall(r"^--- \d/3  \d+ tokens, (?:finished|truncated)$", shown, re.M)) == 3


def test_the_configuration_beside_a_checkpoint_is_that_of_its_run(checkpoint, chat, tmp_path):
    """Also without the trainer's state, in a folder that was moved; ``section.key=value`` changes it."""
    run = tmp_path / "moved"
    shutil.copytree(checkpoint.parent, run)
    shutil.rmtree(run / "checkpoint-1" / "trainer")
    expected = chat("--model", checkpoint, *SAMPLE)[1]
    assert "share_of_digits" in expected
    assert chat("--model", run / "checkpoint-1", *SAMPLE)[1] == expected
    shown = chat("--model", run / "checkpoint-1", *SAMPLE, "rollout.max_completion_length=2")[1]
    assert {int(length) for length in re.findall(r"(\d+) tokens", shown)} <= {1, 2}


def test_a_completion_that_nothing_could_score_has_no_reward(tmp_path, random_model, chat):
    config = tmp_path / "run.yaml"
    config.write_text(f"reward: {{functions: ['{ROOT}/tests/rewards_for_tests.py:unscorable']}}\n")
    shown = chat("--model", random_model, "--config", config, "--prompt", "2+2=", SHORT)[1]
    heads = set(re.findall(r"reward (\S+) \(unscorable (\S+)\)", shown))
    assert heads == {("unscorable", "unscorable"), ("1", "1")}, shown

"""``python -m grpo.chat``: a conversation, and samples of one prompt with their rewards."""

import io
import re
import shutil

import pytest
from conftest import ROOT, small_run

from grpo.commands.chat import main, name_and_value
from train_grpo import main as train

SAMPLE = ("--prompt", "2+2=", "--samples", "3")
SHORT = "rollout.max_completion_length=12"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, random_model):
    folder = tmp_path_factory.mktemp("chat") / "run"
    few = ["optim.max_steps=1", "eval.before_training=false", "data.max_eval_samples=1"]
    assert train([*small_run(random_model, folder), *few]) == 0
    return folder / "checkpoint-1"


@pytest.fixture
def chat(monkeypatch, capsys):
    def run(*arguments, text=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_samples_of_a_prompt_with_the_rewards_of_its_run(checkpoint, chat, tmp_path):
    code, shown, _ = chat("--model", checkpoint, *SAMPLE)
    assert code == 0
    heads = re.findall(
        r"^--- \d/3  (\d+) tokens, (?:finished|truncated), share_of_digits [\d.]+$", shown, re.M
    )
    assert len(heads) == 3
    assert all(1 <= int(length) <= 12 for length in heads)
    assert chat("--model", checkpoint, *SAMPLE)[1] == shown, "seeded"
    assert chat("--model", checkpoint, *SAMPLE, "seed=1")[1] != shown
    # Also without the trainer's state, in a folder that was moved; section.key=value changes the
    # run's settings.
    run = tmp_path / "moved"
    shutil.copytree(checkpoint.parent, run)
    shutil.rmtree(run / "checkpoint-1" / "trainer")
    assert chat("--model", run / "checkpoint-1", *SAMPLE)[1] == shown
    shown = chat("--model", run / "checkpoint-1", *SAMPLE, "rollout.max_completion_length=2")[1]
    assert {int(length) for length in re.findall(r"(\d+) tokens", shown)} <= {1, 2}


def test_a_conversation_goes_on_until_it_is_ended_or_too_long(checkpoint, chat):
    greedy = ("--model", checkpoint, "rollout.top_k=1")
    code, once, _ = chat(*greedy, text="2+2=\n")
    assert code == 0 and once
    assert chat(*greedy, text="2+2=\n\n2+2=\n")[1] == once * 2, "an empty line begins anew"
    code, _, said = chat(*greedy, text=f"{'1+' * 60}\n{'2+' * 60}\n")
    assert (
        code == 2
        and "prompts of the chat are longer than data.max_prompt_length=244 tokens" in said
    )


def test_a_model_without_a_run_gets_the_prompt_alone(random_model, chat, tmp_path):
    """No rewards, also of a base model without a chat template."""
    base = tmp_path / "base"
    shutil.copytree(random_model, base, ignore=shutil.ignore_patterns("*.jinja"))
    for model in (random_model, base):
        code, shown, _ = chat("--model", model, *SAMPLE, SHORT)
        assert (
            code == 0
            and len(re.findall(r"^--- \d/3  \d+ tokens, (?:finished|truncated)$", shown, re.M)) == 3
        )
    code, _, said = chat("--model", random_model, *SAMPLE, SHORT, "--column", "other=1")
    assert code == 2 and "needs the column(s) answer" in said
    # No reset could run without its columns, so there would be nothing to show.
    arguments = [f"environment={ROOT}/tests/turns/user_tools.py:Counting", "reward.functions=[]"]
    code, shown, said = chat("--model", random_model, *SAMPLE, SHORT, *arguments)
    assert code == 2 and not shown
    assert (
        "reset of the environment needs the column(s) shelf; the options --column (answer=null: none) have"
        in said
    )


def test_a_completion_that_nothing_could_score_has_no_reward(tmp_path, random_model, chat):
    config = tmp_path / "run.yaml"
    config.write_text(f"reward: {{functions: ['{ROOT}/tests/rewards_for_tests.py:unscorable']}}\n")
    shown = chat("--model", random_model, "--config", config, "--prompt", "2+2=", SHORT)[1]
    assert set(re.findall(r", unscorable (\S+)$", shown, re.M)) == {"unscorable", "1"}, shown


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("copy=27", 27),
        ("copy=a=b", "a=b"),
        ("answer=007", "007"),
        ("answer=null", None),
        ("answer=", None),
    ],
)
def test_a_column_is_json_or_text_and_the_answer_text_or_none(item, value):
    assert name_and_value(item) == (item.partition("=")[0], value)

"""Secrets in a configuration: masked where they are written, taken from the environment where they
are used."""

import sys

import pytest

from grpo.config import Config, mask_command_line
from grpo.config.secrets import MASK, masked, with_environment
from grpo.rewards import RewardRunner

SECRETS = {
    "api_key": "sk-1",
    "apiKey": "sk",
    "x-api-key": 12345,
    "hf_token": "a",
    "OPENAI_API_KEY_2": "b",
    "key": "p-${JUDGE_KEY}",
    "reward_model_api_key": "c",
    "data_password": "d",
    "end_user_auth_token": "e",
}
NESTED = {
    "auth": {"headers": [{"X": "x"}]},
    "api_keys": ["k", "l"],
    "db": {"password": "p-4", "port": 80},
}
PLAIN = {
    "max_tokens": 5,
    "stop_token": "</s>",
    "answer_key": "final",
    "password": None,
    "template": "Q: ${QUESTION}",
    "api_key": "${JUDGE_KEY}",
    "headers": {"Authorization": "Bearer ${JUDGE_KEY}"},
    "sep": MASK,
}


def config_with(args: dict) -> Config:
    return Config.model_validate(
        {"reward": {"functions": [{"name": "rewards.py:judge", "args": args}]}}
    )


def test_secrets_are_masked_where_they_are_written():
    written = config_with(SECRETS | NESTED).masked_values()["reward"]["functions"][0]["args"]
    hidden = {
        "auth": {"headers": [{"X": MASK}]},
        "api_keys": [MASK, MASK],
        "db": {"password": MASK, "port": 80},
    }
    assert written == dict.fromkeys(SECRETS, MASK) | hidden
    assert config_with(SECRETS).reward.functions[0].args == SECRETS, "the reward gets the real ones"
    for config in (config_with(PLAIN), Config()):
        assert config.masked_values() == config.model_dump(mode="json")


def test_secrets_are_masked_in_the_command(monkeypatch):
    """Nothing else of the command changes."""
    functions = "[{name: judge, args: {api_key: 'it''s', model: sk-model}}]"
    others = ["train_grpo.py", "output_dir=sk-1", "data.answer_pattern=#### (.+)", "--debug"]
    monkeypatch.setattr("sys.argv", [*others, f"reward.functions={functions}"])
    mask_command_line()
    assert sys.argv == [
        *others,
        "reward.functions=[{args: {api_key: '***', model: sk-model}, name: judge}]",
    ]


def test_references_are_resolved_when_the_reward_is_called(monkeypatch):
    functions = config_with(PLAIN).reward.functions
    with pytest.raises(
        ValueError, match=r"^reward 'rewards.py:judge': .* JUDGE_KEY of \$\{JUDGE_KEY\} is not set$"
    ):
        RewardRunner(functions)
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    args = RewardRunner(functions).specs[0].args
    assert args == PLAIN | {"api_key": "sk-1", "headers": {"Authorization": "Bearer sk-1"}}


@pytest.mark.parametrize("values", [{"db": {"password": "p"}}, {"auth": {"user": "p"}}])
def test_a_masked_secret_is_not_taken_for_the_secret(values):
    with pytest.raises(ValueError, match=r"^reward 'judge': (password|auth) was masked when"):
        with_environment(masked(values), "reward 'judge'")

"""Secrets in a configuration: masked where they are written, taken from the environment where they are used."""

import sys

import pytest

from grpo.config import Config, ConfigError, load_config
from grpo.config.arguments import mask_command_line
from grpo.config.secrets import masked, with_environment
from grpo.rewards import RewardRunner

SECRETS = {
    "api_key": "sk-1", "apiKey": "sk", "OPENAI_API_KEY": "sk-2", "x-api-key": "a", "hf_token": "hf_of_the_test_3", "db": {"password": "p-4"},
    "headers": [{"Authorization": "Bearer 5"}, ["X", "Bearer six"]], "api_keys": ["k-6", "k-7"], "client_secret": 8, "token": "hf_of_the_test_3",
    "openai_key": "sk-of-the-test-9", "api_key_2": "b", "my_password": "p-${JUDGE_KEY}",
}  # fmt: skip
MASKED = {
    "api_key": "***", "apiKey": "***", "OPENAI_API_KEY": "***", "x-api-key": "***", "hf_token": "***", "db": {"password": "***"},
    "headers": [{"Authorization": "***"}, ["X", "***"]], "api_keys": ["***", "***"], "client_secret": "***", "token": "***",
    "openai_key": "***", "api_key_2": "***", "my_password": "***",
}  # fmt: skip
PLAIN = {
    "max_tokens": 5, "tokens": 256, "token": "</s>", "stop_token": "</s>", "secretary": "Ann", "num_secrets": 3, "latex": "${x}$ {X}",
    "token_budget": 9, "tokenizer": "gpt2", "value": 1.0, "tag": "answer", "password": None, "answer_key": "final", "template": "Q: ${QUESTION}",
    "api_key": "${JUDGE_KEY}", "headers": {"Authorization": "Bearer ${JUDGE_KEY}"}, "url": "http://host:80/a@b",
}  # fmt: skip


def config_with(args: dict) -> Config:
    return Config.model_validate({"reward": {"functions": [{"name": "rewards.py:judge", "args": args}]}})


def test_secrets_are_masked_where_they_are_written():
    written = config_with(SECRETS).for_writing()["reward"]["functions"][0]["args"]
    assert written == MASKED
    assert config_with(SECRETS).reward.functions[0].args == SECRETS, "the reward gets the real ones"
    assert config_with(PLAIN).for_writing() == config_with(PLAIN).model_dump(mode="json")


def test_the_password_of_a_url_is_masked():
    assert masked(["https://user:pass@host/a", "https://host/a"]) == ["https://user:***@host/a", "https://host/a"]


@pytest.mark.parametrize("written", ["sk-1", "'it''s'", "0012345677", '"a\\"b"', "1_000_777"])
def test_secrets_are_masked_in_the_command(monkeypatch, written):
    """However the value is written in YAML; nothing else of the command changes."""
    secret = f"reward.functions=[{{name: judge, args: {{api_key: {written}, model: sk-model}}}}]"
    others = ["train_grpo.py", "output_dir=sk-1", "data.answer_pattern=#### (.+)", "data.system_prompt=Answer: [x #"]
    monkeypatch.setattr("sys.argv", [*others, secret])
    mask_command_line()
    assert sys.argv == [*others, "reward.functions=[{args: {api_key: '***', model: sk-model}, name: judge}]"]


def test_an_error_shows_no_secret():
    with pytest.raises(ConfigError, match=r"'api_key': '\*\*\*'"):
        load_config(["reward.functions={name: judge, args: {api_key: sk-1}}"])


def test_references_are_resolved_when_the_reward_is_called(monkeypatch):
    functions = config_with(PLAIN).reward.functions
    with pytest.raises(
        ValueError,
        match=r"^reward 'rewards.py:judge': the environment variable JUDGE_KEY of \$\{JUDGE_KEY\} is not set$",
    ):
        RewardRunner(functions)
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    args = RewardRunner(functions).specs[0].args
    assert (args["api_key"], args["headers"], args["stop_token"]) == ("sk-1", {"Authorization": "Bearer sk-1"}, "</s>")


def test_a_masked_secret_is_not_taken_for_the_secret():
    with pytest.raises(ValueError, match="a secret was masked when the configuration was written: give it again"):
        with_environment(masked(SECRETS), "reward 'judge'")

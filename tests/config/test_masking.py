"""Secrets in a configuration: masked where they are written, taken from the environment where they are used."""

import pytest

from grpo.config import Config
from grpo.rewards import RewardRunner
from grpo.system.masking import mask_command_line, masked, with_environment

SECRETS = {
    "api_key": "sk-1", "OPENAI_API_KEY": "sk-2", "hf_token": "hf-3", "db": {"password": "p-4"}, "headers": [{"Authorization": "Bearer 5"}],
    "api_keys": ["k-6", "k-7"], "client_secret": 8,
}  # fmt: skip
PLAIN = {
    "max_tokens": 5, "stop_token": "</s>", "token_budget": 9, "tokenizer": "gpt2", "value": 1.0, "tag": "answer", "password": None,
    "api_key": "${JUDGE_KEY}", "headers": {"Authorization": "Bearer ${JUDGE_KEY}"},
}  # fmt: skip


def config_with(args: dict) -> Config:
    return Config.model_validate({"reward": {"functions": [{"name": "rewards.py:judge", "args": args}]}})


def test_secrets_are_masked_where_they_are_written():
    written = config_with(SECRETS).for_writing()["reward"]["functions"][0]["args"]
    assert written == {
        "api_key": "***", "OPENAI_API_KEY": "***", "hf_token": "***", "db": {"password": "***"}, "headers": [{"Authorization": "***"}],
        "api_keys": ["***", "***"], "client_secret": "***",
    }  # fmt: skip
    assert config_with(SECRETS).reward.functions[0].args == SECRETS, "the reward gets the real ones"
    assert config_with(PLAIN).for_writing() == config_with(PLAIN).model_dump(mode="json")


def test_secrets_are_masked_in_the_command(monkeypatch):
    override = "reward.functions=[{name: judge, args: {api_key: sk-1, model: sk-model}}]"
    monkeypatch.setattr("sys.argv", ["train_grpo.py", override])
    mask_command_line(config_with(SECRETS).model_dump())
    import sys

    assert sys.argv[1] == "reward.functions=[{name: judge, args: {api_key: ***, model: sk-model}}]"


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

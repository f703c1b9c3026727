"""Secrets in a configuration: masked where they are written, taken from the environment where they are used."""

import sys

import pytest

from grpo.config import Config, ConfigError, load_config, mask_command_line
from grpo.config.secrets import MASK, masked, with_environment
from grpo.rewards import RewardRunner

SECRETS = {
    "api_key": "sk-1", "apiKey": "sk", "x-api-key": 12345, "hf_token": "a", "db": {"password": "p-4", "port": MASK},
    "auth": {"headers": [{"Authorization": "x"}]}, "api_keys": ["k", "l"], "client_secret": 8, "OPENAI_API_KEY_2": "b",
    "jwt": "c", "key": "p-${JUDGE_KEY}", "credentials": "d",
}  # fmt: skip
EMBEDDED = {"url": "https://user:pass@host/a", "headers": [["X", "Bearer six"]]}
PLAIN = {
    "max_tokens": 5, "tokens": 256, "num_tokens": 3, "stop_token": "</s>", "answer_key": "final", "key_column": "id",
    "tokens_per_microbatch": 1, "max_completion_length": 9, "token_budget": 9, "tokenizer": "gpt2", "keyword": "a",
    "password": None, "author": "Ann", "latex": "${x}$ {X}", "template": "Q: ${QUESTION}", "api_key": "${JUDGE_KEY}",
    "headers": {"Authorization": "Bearer ${JUDGE_KEY}"}, "url": "http://host:80/a@b", "secretary": "Ann", "sep": MASK,
}  # fmt: skip


def config_with(args: dict) -> Config:
    return Config.model_validate({"reward": {"functions": [{"name": "rewards.py:judge", "args": args}]}})


def test_secrets_are_masked_where_they_are_written():
    written = config_with(SECRETS | EMBEDDED).for_writing()["reward"]["functions"][0]["args"]
    hidden = {"db": {"password": MASK, "port": MASK}, "auth": {"headers": [{"Authorization": MASK}]}}
    hidden |= {"api_keys": [MASK, MASK], "url": f"https://user:{MASK}@host/a", "headers": [["X", f"Bearer {MASK}"]]}
    assert written == dict.fromkeys(SECRETS, MASK) | hidden
    assert config_with(SECRETS).reward.functions[0].args == SECRETS, "the reward gets the real ones"
    for config in (config_with(PLAIN), Config()):
        assert config.for_writing() == config.model_dump(mode="json")


@pytest.mark.parametrize("written", ["sk-1", "'it''s'", "0012345677", '"a\\"b"'])
def test_secrets_are_masked_in_the_command(monkeypatch, written):
    """In every form of YAML, and for a whole section; nothing else of the command changes."""
    functions = f"[{{name: judge, args: {{api_key: {written}, model: sk-model}}}}]"
    others = ["train_grpo.py", "output_dir=sk-1", "data.answer_pattern=#### (.+)", "data.system_prompt=Answer: [x #"]
    monkeypatch.setattr("sys.argv", [*others, f"reward.functions={functions}", f"reward={{functions: {functions}}}"])
    mask_command_line()
    hidden = "[{args: {api_key: '***', model: sk-model}, name: judge}]"
    assert sys.argv == [*others, f"reward.functions={hidden}", f"reward={{functions: {hidden}}}"]


def test_an_error_shows_no_secret():
    with pytest.raises(ConfigError, match=r"'api_key': '\*\*\*'"):
        load_config(["reward.functions={name: judge, args: {api_key: sk-1}}"])


def test_references_are_resolved_when_the_reward_is_called(monkeypatch):
    functions = config_with(PLAIN).reward.functions
    with pytest.raises(ValueError, match=r"^reward 'rewards.py:judge': .* JUDGE_KEY of \$\{JUDGE_KEY\} is not set$"):
        RewardRunner(functions)
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    args = RewardRunner(functions).specs[0].args
    assert args == PLAIN | {"api_key": "sk-1", "headers": {"Authorization": "Bearer sk-1"}}


@pytest.mark.parametrize("values", [{"db": {"password": "p"}}, {"url": EMBEDDED["url"]}, {"headers": ["Bearer six"]}])
def test_a_masked_secret_is_not_taken_for_the_secret(values):
    with pytest.raises(ValueError, match=rf"^reward 'judge': {next(iter(values))}(\.password)? was masked when"):
        with_environment(masked(values), "reward 'judge'")

"""``grpo.train`` with tools and environments as Python objects."""

import random

import pytest
from conftest import small_run

from grpo import train
from grpo.telemetry.samples import read_samples


class Local:
    """A class that no worker can import: it travels pickled by value."""

    def reset(self, **row):
        self.said = 0

    def say(self, text: str) -> str:
        """Say something.

        Args:
            text: what
        """
        self.said += 1
        return text.upper()

    def get_reward(self):
        return float(self.said)


def settings_of(model, output):
    words = [word for word in small_run(model, output) if not word.startswith(("--config", "reward."))]
    pairs = dict(word.split("=", 1) for word in words)
    number = {k: float(v) if "." in v or "e-" in v else int(v) if v.isdigit() else v for k, v in pairs.items()}
    return number | {"optim.max_steps": 1, "rollout.max_completion_length": 30}


def short(prompts, completions, environments=None, **columns):
    assert environments is None or all(environment.said >= 0 for environment in environments)
    return [-float(len(completion[-1]["content"])) for completion in completions]


def test_objects_in_place_of_names(tmp_path, random_model):
    class Inner(Local):
        """Defined inside of a function."""

    result = train(settings_of(random_model, tmp_path / "a"), environment_factory=Inner, reward_functions=short)
    line = result.metrics[-1]
    assert {"rewards/Inner/mean", "rewards/short/mean", "tools/say/calls", "turns/mean"} <= line.keys()

    def twice(text: str) -> str:
        """Say it twice.

        Args:
            text: what
        """
        return text * 2

    result = train(settings_of(random_model, tmp_path / "b"), tools=[twice, "calculator"], reward_functions=short)
    assert {"tools/twice/calls", "tools/calculator/calls"} <= result.metrics[-1].keys()
    with pytest.raises(ValueError, match="no function or class"):
        train(settings_of(random_model, tmp_path / "c"), tools=[3])
    with pytest.raises(ValueError, match="has no docstring"):
        train(settings_of(random_model, tmp_path / "c"), tools=[lambda text: text])


class Count:
    """Makes its own prompt."""

    def reset(self, environment, **row):
        assert environment == "a column like any other" and row["prompt"] == ""
        self.target = random.randint(1, 9)
        return f"Count to {self.target}."

    def get_reward(self):
        return float(self.target)


@pytest.mark.slow
def test_rows_without_a_prompt_get_that_of_reset(tmp_path, random_model):
    """TRL's dataset that only has columns for the environment."""
    settings = settings_of(random_model, tmp_path / "run")
    settings |= {"logging.log_completions": 1000, "reward.num_workers": 1}
    rows = [{"environment": "a column like any other"}] * 16
    train(settings, environment_factory=Count, dataset=rows)
    saved = read_samples(tmp_path / "run" / "completions" / "step_000001.parquet")
    assert all(row["prompt"].startswith("Count to ") for row in saved)
    named = settings | {"output_dir": tmp_path / "c", "data.prompt_column": "question"}
    with pytest.raises(ValueError, match=r"data\.prompt_column=question: .* has no such column"):
        train(named, dataset=rows, environment_factory=Count)
    with pytest.raises(ValueError, match=r"data\.prompt_column=prompt: .* has no such column"):
        train(settings | {"output_dir": tmp_path / "d"}, dataset=rows, reward_functions=short)

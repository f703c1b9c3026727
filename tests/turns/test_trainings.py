"""``grpo.train`` with tools and environments as Python objects."""

import random
import threading

import pytest

from grpo import train
from grpo.telemetry.samples import read_samples
from grpo.turns.sessions import LoadedEnvironment


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
    return {
        "output_dir": output,
        "model.name_or_path": model,
        "data.dataset": "builtin:arithmetic",
        "data.max_train_samples": 8,
        "data.max_eval_samples": 1,
        "reward.num_workers": 1,
        "rollout.prompts_per_step": 2,
        "rollout.num_generations": 4,
        "rollout.max_completion_length": 30,
        "eval.before_training": False,
        "optim.max_steps": 1,
        "runtime.precision": "fp32",
        "runtime.threads_per_rank": 1,
    }


def short(prompts, completions, environments=None, **columns):
    assert environments is None or all(environment.said >= 0 for environment in environments)
    return [-float(len(completion[-1]["content"])) for completion in completions]


def test_an_environment_of_a_class_object(tmp_path, random_model):
    class Inner(Local):
        """Defined inside of a function."""

    result = train(
        settings_of(random_model, tmp_path),
        environment_factory=Inner,
        reward_functions=short,
    )
    names = {"rewards/Inner/mean", "rewards/short/mean", "tools/say/calls", "turns/mean"}
    assert names <= result.metrics[-1].keys()


def test_tools_of_function_objects(tmp_path, random_model):
    def twice(text: str) -> str:
        """Say it twice.

        Args:
            text: what
        """
        return text * 2

    result = train(
        settings_of(random_model, tmp_path / "a"),
        tools=[twice, "calculator"],
        reward_functions=short,
    )
    assert {"tools/twice/calls", "tools/calculator/calls"} <= result.metrics[-1].keys()

    lock = threading.Lock()

    def locked(text: str) -> str:
        """Say it.

        Args:
            text: what
        """
        return f"{text} {lock.locked()}"

    refused = [
        (3, "no function or class"),
        (lambda text: text, "has no docstring"),
        # Tools run in workers alone.
        (locked, "cannot pickle '_thread.lock' object; write it into a file"),
    ]
    for tool, message in refused:
        with pytest.raises(ValueError, match=message):
            train(settings_of(random_model, tmp_path / "b"), tools=[tool])


def test_a_method_without_docstring_is_refused():
    class Shop:
        def reset(self):
            self.seen = []

        def helper(self):
            return 1

    with pytest.raises(ValueError, match="helper has no docstring, and every public method is"):
        LoadedEnvironment({}, "shop", Shop).describe()


class Count:
    """Makes its own prompt."""

    def reset(self, environment, **row):
        assert environment == "a column like any other"
        assert row["prompt"] == ""
        self.target = random.randint(1, 9)
        return f"Count to {self.target}."

    def get_reward(self):
        return float(self.target)


@pytest.mark.slow
def test_rows_without_a_prompt_get_that_of_reset(tmp_path, random_model):
    """TRL's dataset that only has columns for the environment."""
    settings = settings_of(random_model, tmp_path / "run")
    settings["logging.log_completions"] = 1000
    rows = [{"environment": "a column like any other"}] * 16
    train(settings, environment_factory=Count, dataset=rows)
    saved = read_samples(tmp_path / "run" / "completions" / "step_000001.parquet")
    assert all(row["prompt"].startswith("Count to ") for row in saved)

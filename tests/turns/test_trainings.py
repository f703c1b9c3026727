"""``grpo.train`` with tools, environments and rollout functions as Python objects."""

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


@pytest.mark.slow
def test_a_continued_run_says_that_objects_are_not_compared(tmp_path, random_model, capsys):
    def twice(text: str) -> str:
        """Say it twice.

        Args:
            text: what
        """
        return text * 2

    for note in (False, True):
        train(settings_of(random_model, tmp_path), tools=[twice], reward_functions=["accuracy"])
        said = "tools and environments that are Python objects are not compared" in capsys.readouterr().out
        assert said == note


def test_a_rollout_function_trains(tmp_path, random_model):
    def roll(prompts, generate):
        ids = [[5, 6] for _ in prompts]
        found = generate(ids, max_tokens=9)
        rest = generate([p + f["completion_ids"] + [9] for p, f in zip(ids, found, strict=True)], max_tokens=9)
        pairs = list(zip(found, rest, strict=True))
        return {
            "prompt_ids": ids,
            "completion_ids": [a["completion_ids"] + [9] + b["completion_ids"] for a, b in pairs],
            "logprobs": [a["logprobs"] + [0.0] + b["logprobs"] for a, b in pairs],
            "env_mask": [[1] * len(a["completion_ids"]) + [0] + [1] * len(b["completion_ids"]) for a, b in pairs],
            "extra": [len(a["completion_ids"]) for a, b in pairs],
        }

    def reward(prompts, completions, extra, **columns):
        return [float(n) for n in extra]

    result = train(settings_of(random_model, tmp_path / "run"), rollout_func=roll, reward_functions=reward)
    assert result.metrics[-1]["sampling/logprob_difference"] < 1e-4
    rows = read_samples(tmp_path / "run" / "completions" / "step_000001.parquet")
    assert all(False in row["sampled"] for row in rows) and rows[0]["rewards"]["reward"] > 0


class Count:
    """Makes its own prompt, as in TRL's example of several environments."""

    def reset(self, **row):
        assert "prompt" not in row or row["prompt"] == ""
        self.target = random.randint(1, 9)
        return f"Count to {self.target}."

    def get_reward(self):
        return float(self.target)


class Tiles(Count):
    def reset(self, **row):
        super().reset(**row)
        return f"Move to {self.target}."


class Routed(Count):
    def reset(self, environment, **row):
        assert environment == "a column like any other"
        return super().reset(**row)


class Silent(Count):
    def reset(self, **row):
        self.target = 0


@pytest.mark.slow
def test_rows_without_a_prompt_get_that_of_reset(tmp_path, random_model):
    """TRL's dataset that only chooses the environment."""
    settings = settings_of(random_model, tmp_path / "run")
    settings |= {"logging.log_completions": 1000, "reward.num_workers": 1}
    rows = [{"environment": "count"}, {"environment": "tiles"}] * 8
    train(settings, environment_factory={"count": Count, "tiles": Tiles}, dataset=rows)
    saved = read_samples(tmp_path / "run" / "completions" / "step_000001.parquet")
    prompts = {row["prompt"] for row in saved}
    assert any(prompt.startswith("Count to ") for prompt in prompts)
    assert any(prompt.startswith("Move to ") for prompt in prompts)

    settings["output_dir"] = tmp_path / "levels"
    train(settings, environment_factory=Routed, dataset=[{"environment": "a column like any other"}] * 16)
    with pytest.raises(ValueError, match=r"a row has no prompt, and reset\(\) of Silent returned none"):
        train(settings | {"output_dir": tmp_path / "b"}, environment_factory=Silent, dataset=rows)
    named = settings | {"output_dir": tmp_path / "c", "data.prompt_column": "question"}
    with pytest.raises(ValueError, match=r"data\.prompt_column=question: .* has no such column"):
        train(named, dataset=rows, environment_factory=Count)
    with pytest.raises(ValueError, match=r"data\.prompt_column=prompt: .* has no such column"):
        train(settings | {"output_dir": tmp_path / "d"}, dataset=rows, reward_functions=short)

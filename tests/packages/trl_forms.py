"""Environments and rewards in the form of TRL's examples, and a model that calls their tools.

They have the methods, the signatures, the state and the rewards of ``wordle`` and ``multi_env``, and know nothing of this project. ``python trl_forms.py FOLDER`` trains all with TRL.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from openenv_game import GameClient, Guess
from speaking import call

ENV_URL = os.environ.get("GAME_URL")
STEPS = 6
GENERATIONS = 4
SLOTS = 2 * GENERATIONS
LEARNING_RATE = 3e-4
MAX_LENGTH = 600


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class WordEnv:
    """The game repeats all that it said before in each turn. The tool returns what is new."""

    def __init__(self):
        self.client = GameClient(base_url=ENV_URL).sync()

    def reset(self, **kwargs) -> str | None:
        result = self.client.reset()
        self._last_full_feedback = result.observation.messages[0].content
        self.reward = 0.0
        self.done = False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Guess the letters.

        Args:
            guess: Three letters

        Returns:
            A mark for each.
        """
        if self.done:
            raise ValueError("The game has ended.")
        result = self.client.step(Guess(message=guess))
        full_feedback = result.observation.messages[0].content
        feedback = full_feedback[len(self._last_full_feedback) :]
        self._last_full_feedback = full_feedback
        self.reward = result.reward
        self.done = result.done
        return feedback


class MultiEnv:
    """Two games in one class: a column chooses one. Each episode has a new client."""

    def __init__(self):
        self._client = None
        self.active = None
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.active = kwargs.get("env", "letters")
        self.reward = 0.0
        self.done = False
        if self._client is not None:
            self._client.close()
        self._client = GameClient(base_url=ENV_URL)
        return self._client.reset().observation.messages[0].content

    def guess(self, guess: str) -> str:
        """Guess the letters.

        Args:
            guess: Three letters

        Returns:
            What was guessed.
        """
        if self.active != "letters":
            raise ValueError("this is no game of letters")
        return self._play(guess)

    def stay(self) -> str:
        """Do nothing.

        Returns:
            What was done.
        """
        if self.active != "catch":
            raise ValueError("this is no game of catch")
        return self._play("dxx")

    def _play(self, message: str) -> str:
        if self.done:
            raise ValueError("The game has ended.")
        result = self._client.step(Guess(message=message))
        self.reward = result.reward
        self.done = result.done
        return result.observation.echoed_message


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


def letters_reward(environments, **kwargs) -> list[float | None]:
    return [env.reward if env.active == "letters" else None for env in environments]


def catch_reward(environments, **kwargs) -> list[float | None]:
    rewards = []
    for env in environments:
        if env.active != "catch":
            rewards.append(None)
        else:
            rewards.append(env.reward if env.done else 0.0)
    return rewards


@dataclass
class Form:
    """What a script of TRL passes to its trainer, and the calls that the model makes."""

    environment: type
    rewards: list
    rows: list[dict]
    phrases: list[str]


FORMS = {
    "wordle": Form(
        WordEnv,
        [reward_func],
        [{"prompt": user("Play. ")}] * 8,
        [call("guess", guess="dab"), call("guess", guess="dxx"), call("guess", word="dxx")],
    ),
    "multi": Form(
        MultiEnv,
        [letters_reward, catch_reward],
        [{"prompt": user("Play. "), "env": "letters"}, {"prompt": user("Catch. "), "env": "catch"}] * 4,
        [call("guess", guess="dab"), call("guess", guess="dxx"), call("stay")],
    ),
}


def write_state(completions, environments, prompts, **kwargs):
    """Write each conversation, and what its environment holds at its end."""
    with open(os.environ["STATES"], "a") as file:
        rows = zip(prompts, completions, environments, strict=True)
        for number, (prompt, completion, environment) in enumerate(rows):
            state = {name: value for name, value in vars(environment).items() if is_plain(value)}
            columns = {"env": kwargs["env"][number]} if "env" in kwargs else {}
            file.write(json.dumps([prompt, completion, state, columns]) + "\n")
    return [0.0] * len(completions)


def is_plain(value) -> bool:
    return isinstance(value, str | float | int | list | None)


def train_with_trl(folder: Path, name: str) -> None:
    """Train the model in ``folder/name/model`` as a script of TRL does. Writes the log of its steps."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    form = FORMS[name]
    model = str(folder / name / "model")
    arguments = trl.GRPOConfig(
        output_dir=str(folder / name / "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_steps=STEPS,
        num_generations=GENERATIONS,
        per_device_train_batch_size=SLOTS,
        learning_rate=LEARNING_RATE,
        max_completion_length=MAX_LENGTH,
        activation_checkpointing=False,
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model,
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=[*form.rewards, write_state],
        train_dataset=datasets.Dataset.from_list(form.rows),
        environment_factory=form.environment,
    )
    trainer.train()
    (folder / name / "trl.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    import multiprocessing

    from trl import GRPOTrainer  # noqa: F401 - once for all forms

    for name in FORMS:
        os.environ["STATES"] = f"{sys.argv[1]}/{name}/trl.jsonl"
        # TRL closes no environment, so the sessions end with the process.
        run = multiprocessing.get_context("fork").Process(target=train_with_trl, args=(Path(sys.argv[1]), name))
        run.start()
        run.join()
        assert run.exitcode == 0

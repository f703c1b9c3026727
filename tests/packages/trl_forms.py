"""Environments and rewards in the form of TRL's examples, and a model that calls their tools.

They have the methods, the signatures, the state and the rewards of ``echo``, ``wordle``, ``sudoku``, ``multi_env`` and
``grpo_2048``, and know nothing of this project. ``python trl_forms.py FOLDER`` trains all with TRL.
"""

import json
import os
import random
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


def echo_class(env_url: str):
    """A class that finds the address in the function around it, and whose client is asynchronous."""

    class EchoToolEnv:
        def __init__(self):
            self.env = GameClient(base_url=env_url)
            self.reward = 0.0

        def reset(self, **kwargs) -> str | None:
            self.reward = 0.0
            self.env.reset()
            return None

        def echo(self, message: str) -> str:
            """
            Echo a message.

            Args:
                message: What to echo

            Returns:
                The message.
            """
            observation = self.env.step(Guess(message=message))
            self.reward = observation.observation.reward
            return observation.observation.echoed_message

    return EchoToolEnv


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


class BoardEnv:
    """A tool with several arguments, and rewards that are properties."""

    def __init__(self):
        self.client = GameClient(base_url=ENV_URL)
        self._reset_state()

    def _reset_state(self):
        self._moves: list[str] = []
        self._scores: list[float] = []
        self._done = False

    def reset(self, **kwargs) -> str:
        self._reset_state()
        result = self.client.reset()
        self._done = result.done
        return f"\nBoard: {result.observation.messages[0].content}"

    def place(self, row: int, col: int, number: int) -> str:
        """Place a number.

        Args:
            row: Row (1-9).
            col: Column (1-9).
            number: Number (1-9).

        Returns:
            The board.
        """
        if self._done:
            raise ValueError("The game has ended.")
        move = "dabcefghi"[number - 1] * row + "a" * col
        self._moves.append(move)
        result = self.client.step(Guess(message=move))
        self._scores.append(float(result.reward or 0.0))
        self._done = result.done
        return f"{len(self._moves)}: {move}"

    @property
    def best_reward(self) -> float:
        return max(self._scores, default=0.0)

    @property
    def repetition_reward(self) -> float:
        return -0.1 * (len(self._moves) - len(set(self._moves)))


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


class Tiles:
    """A game without a server, which draws from ``random`` in ``reset`` and in its tool."""

    def reset(self, **kwargs) -> str:
        self.row = [0, 0, 0, 0]
        self.score = 0.0
        self.done = False
        self._add()
        self._add()
        return self._show()

    def move(self, direction: str) -> str:
        """
        Move all tiles.

        Args:
            direction: left or right

        Returns:
            The tiles.
        """
        if self.done:
            raise ValueError("The game has ended.")
        tiles = [tile for tile in self.row if tile]
        if direction == "left" and len(tiles) > 1 and tiles[0] == tiles[1]:
            tiles[:2] = [2 * tiles[0]]
            self.score += tiles[0]
        self.row = tiles + [0] * (4 - len(tiles))
        self.done = 0 not in self.row
        if not self.done:
            self._add()
        return self._show()

    def _add(self) -> None:
        place = random.choice([place for place in range(4) if self.row[place] == 0])
        self.row[place] = 4 if random.random() < 0.1 else 2

    def _show(self) -> str:
        return f"score={self.score} {self.row} done={self.done}"


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


def reward_best(environments, **kwargs) -> list[float]:
    return [env.best_reward for env in environments]


def reward_repetition(environments, **kwargs) -> list[float]:
    return [env.repetition_reward for env in environments]


def reward_score(environments, **kwargs):
    return [env.score for env in environments]


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
    "echo": Form(
        echo_class(ENV_URL),
        [reward_func],
        [{"prompt": user("Echo.")}] * 8,
        [call("echo", message="dxb"), call("echo", message="xxx")],
    ),
    "wordle": Form(
        WordEnv,
        [reward_func],
        [{"prompt": user("Play. ")}] * 8,
        [call("guess", guess="dab"), call("guess", guess="dxx"), call("guess", word="dxx")],
    ),
    "sudoku": Form(
        BoardEnv,
        [reward_best, reward_repetition],
        [{"prompt": user("Play.")}] * 8,
        [call("place", row=1, col=2, number=1), call("place", row=2, col=1, number=3)],
    ),
    "multi": Form(
        MultiEnv,
        [letters_reward, catch_reward],
        [{"prompt": user("Play. "), "env": "letters"}, {"prompt": user("Catch. "), "env": "catch"}] * 4,
        [call("guess", guess="dab"), call("guess", guess="dxx"), call("stay")],
    ),
    "2048": Form(
        Tiles,
        [reward_score],
        [{"prompt": user("Play. ")}] * 8,
        [call("move", direction="left"), call("move", direction="right")],
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

"""An environment and a reward in the form of TRL's examples, and a model that calls its tool.

They have the methods, the signatures, the state and the reward of ``wordle``, and know nothing of
this project. ``python trl_forms.py FOLDER`` trains with TRL."""

import json
import os
import sys
from pathlib import Path

from openenv_game import GameClient, Guess
from speaking import call

ENV_URL = os.environ.get("GAME_URL")
STEPS = 6
GENERATIONS = 4
SLOTS = 2 * GENERATIONS
LEARNING_RATE = 3e-4
MAX_LENGTH = 600
ROWS = [{"prompt": [{"role": "user", "content": "Play. "}]}] * 8
PHRASES = [
    call("guess", guess="dab"),
    call("guess", guess="dxx"),
    call("guess", word="dxx"),
]
"""The calls that the model makes."""


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


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


def write_state(completions, environments, prompts, **kwargs):
    """Write each conversation, and what its environment holds at its end."""
    with open(os.environ["STATES"], "a") as file:
        for prompt, completion, environment in zip(prompts, completions, environments, strict=True):
            file.write(json.dumps([prompt, completion, plain_state(environment)]) + "\n")
    return [0.0] * len(completions)


def plain_state(environment) -> dict:
    """The attributes that JSON can hold."""
    state = {}
    for name, value in vars(environment).items():
        if isinstance(value, str | float | int | list | None):
            state[name] = value
    return state


def train_with_trl(folder: Path) -> None:
    """Train the model in ``folder/model`` as a script of TRL does. Writes the log of its steps."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    model = str(folder / "model")
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
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
        reward_funcs=[reward_func, write_state],
        train_dataset=datasets.Dataset.from_list(ROWS),
        environment_factory=WordEnv,
    )
    trainer.train()
    (folder / "trl.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    train_with_trl(Path(sys.argv[1]))

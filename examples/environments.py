"""Environments of other packages, as glue of a few lines (docs/tools.md has the table).

``environment: "examples/environments.py:Sudoku"`` in a configuration names one. Each package is
imported where it is used, so that the others need not be installed.
"""


class Sudoku:
    """A game of GEM. Its board is in ``info["suffix"]``, which GEM's own wrappers append.

    These wrappers would also repeat the whole conversation in each observation.
    """

    game_id = "game:Sudoku-v0-easy"

    def __init__(self):
        import gem

        self.game = gem.make(self.game_id)

    def reset(self, seed):
        text, info = self.game.reset(seed)
        return text + info["suffix"]

    def step(self, action):
        text, reward, terminated, truncated, info = self.game.step(action)
        return f"{text}\n{info['suffix']}", reward, terminated, truncated, info


class GuessTheNumber:
    """A game of TextArena for one player. The ending ``-raw`` leaves out TextArena's wrappers.

    These would repeat the whole conversation in each observation, and keep it after a reset.
    """

    game_id = "GuessTheNumber-v0-raw"
    num_players = 1

    def reset(self, seed):
        import textarena

        self.game = textarena.make(self.game_id)
        self.game.reset(self.num_players, seed)
        return self.observe()

    def observe(self):
        _, messages = self.game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender != 0)

    def step(self, action):
        done, info = self.game.step(action)
        rewards, _ = self.game.close()
        return self.observe(), rewards[0] if done else 0.0, done, False, info


class TicTacToe(GuessTheNumber):
    """A game of TextArena for two. The opponent places its mark at random."""

    game_id = "TicTacToe-v0-raw"
    num_players = 2

    def step(self, action):
        import random

        done, info = self.game.step(action)
        while not done and self.game.state.current_player_id == 1:
            board = self.game.state.game_state["board"]
            free = [cell for cell in range(9) if not board[cell // 3][cell % 3]]
            done, info = self.game.step(f"[{random.choice(free)}]")
        rewards, _ = self.game.close()
        return self.observe(), rewards[0] if done else 0.0, done, False, info


class Blackjack:
    """A game of Gymnasium. Its actions are numbers, and its observations need words."""

    def __init__(self):
        import gymnasium

        self.game = gymnasium.make("Blackjack-v1")

    def reset(self, seed):
        (total, shown, _), _ = self.game.reset(seed=seed)
        return f"Your cards count {total}, the dealer shows {shown}. Do you hit or stick?"

    def step(self, action):
        (total, *_), *result = self.game.step(int("hit" in action.lower()))
        return f"Your cards count {total}. Do you hit or stick?", *result


class SkyGsm8k:
    """A problem of SkyRL-gym. Its object serves one episode, and needs the columns of the row."""

    def reset(self, prompt, **row):
        from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv

        self.game = GSM8kMultiTurnEnv(extras=row)
        self.game.init(prompt)

    def step(self, action):
        result = self.game.step(action)
        text = "".join(message["content"] for message in result["observations"])
        return text, result["reward"], result["done"], False, {}


class OpenEnvGame:
    """A game behind a server of OpenEnv, whose address is in the variable ``GAME_URL``.

    With a package's own client, such as ``EchoEnv``, an action is an object of its class,
    ``EchoAction(message=action)``, and the parts of an observation are attributes.
    """

    def __init__(self):
        import os

        from openenv import GenericEnvClient

        self.client = GenericEnvClient(base_url=os.environ["GAME_URL"]).sync()

    def reset(self, seed):
        return self.client.reset(seed=seed).observation["echoed_message"]

    def step(self, action):
        result = self.client.step({"message": action})
        return result.observation["echoed_message"], result.reward, result.done, False, {}

    def close(self):
        self.client.close()


class Gsm8k:
    """A problem of GSM8K in Aviary, whose tools are methods here. The first answer ends it."""

    async def reset(self, prompt, answer, **row):
        from aviary.envs.gsm8k import CalculatorEnv

        self.problem = CalculatorEnv(None, str(prompt), answer.replace(",", ""))
        await self.problem.reset()
        self.reward = 0.0
        self.done = False

    async def calculator(self, expr: str) -> str:
        """Calculate a number.

        Args:
            expr: an expression of Python
        """
        return await self._call("calculator", expr=expr)

    async def submit_answer(self, answer: str) -> str:
        """Give the answer to the problem.

        Args:
            answer: a number
        """
        return await self._call("submit_answer", answer=answer)

    async def _call(self, name, **arguments):
        from aviary.core import ToolCall, ToolRequestMessage

        if self.done:
            raise ValueError("the problem has ended")
        action = ToolRequestMessage(tool_calls=[ToolCall.from_name(name, **arguments)])
        messages, reward, self.done, _ = await self.problem.step(action)
        self.reward += reward
        return messages[0].content

    def get_reward(self):
        return self.reward

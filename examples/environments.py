"""Environments of other packages, each adapted in a few lines (docs/tools.md has a table).

A configuration names an environment by ``environment: "examples/environments.py:Sudoku"``. A
reset/step environment has two methods. ``reset`` returns the prompt. ``step`` gets the text of a
turn of the model, and returns the same values as in Gymnasium: observation, reward, terminated,
truncated, info.
"""


class Sudoku:
    """A game of GEM. The board of the game is in ``info["suffix"]``.

    GEM's wrappers are not used: they would append the board, and would also repeat the whole
    conversation in each observation.
    """

    game_id = "game:Sudoku-v0-easy"

    def __init__(self):
        # Each package is imported where it is used, so that the others need not be installed.
        import gem

        self.game = gem.make(self.game_id)

    def reset(self, seed):
        text, info = self.game.reset(seed)
        return text + info["suffix"]

    def step(self, action):
        text, reward, terminated, truncated, info = self.game.step(action)
        observation = f"{text}\n{info['suffix']}"
        return observation, reward, terminated, truncated, info


class GuessTheNumber:
    """A game of TextArena for one player. ``-raw`` in the id leaves out TextArena's wrappers.

    The wrappers would repeat the whole conversation in each observation, and keep it after a reset.
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
        # Player 0 is the model. Its own messages are in the conversation already.
        texts = [text for sender, text, _ in messages if sender != 0]
        return "\n".join(texts)

    def step(self, action):
        done, info = self.game.step(action)
        return self.result(done, info)

    def result(self, done, info):
        # TextArena gives its rewards at the end of the game, by player.
        rewards, _ = self.game.close()
        reward = rewards[0] if done else 0.0
        return self.observe(), reward, done, False, info


class TicTacToe(GuessTheNumber):
    """A game of TextArena for two players. The opponent places its mark at random."""

    game_id = "TicTacToe-v0-raw"
    num_players = 2

    def step(self, action):
        import random

        done, info = self.game.step(action)
        while not done and self.game.state.current_player_id == 1:
            board = self.game.state.game_state["board"]
            free_cells = []
            for cell in range(9):
                if not board[cell // 3][cell % 3]:
                    free_cells.append(cell)
            # The trainer seeds Python's random numbers before each step, so a game can be repeated.
            move = random.choice(free_cells)
            done, info = self.game.step(f"[{move}]")
        return self.result(done, info)


class Blackjack:
    """A game of Gymnasium. Its actions and observations are numbers, and this class adds words."""

    def __init__(self):
        import gymnasium

        self.game = gymnasium.make("Blackjack-v1")

    def reset(self, seed):
        cards, _ = self.game.reset(seed=seed)
        total, dealer_card, _ = cards
        return f"Your cards count {total}, the dealer shows {dealer_card}. Do you hit or stick?"

    def step(self, action):
        is_hit = "hit" in action.lower()
        cards, reward, terminated, truncated, info = self.game.step(int(is_hit))
        total, _, _ = cards
        observation = f"Your cards count {total}. Do you hit or stick?"
        return observation, reward, terminated, truncated, info


class SkyGsm8k:
    """A problem of SkyRL-gym. Each reset makes a new game from the columns of the dataset's row."""

    # The prompt and the columns of the dataset's row are arguments of reset, by name.
    def reset(self, prompt, **row):
        from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv

        self.game = GSM8kMultiTurnEnv(extras=row)
        self.game.init(prompt)

    def step(self, action):
        result = self.game.step(action)
        messages = result["observations"]
        contents = [message["content"] for message in messages]
        text = "".join(contents)
        return text, result["reward"], result["done"], False, {}


class OpenEnvGame:
    """A game on an OpenEnv server. The environment variable ``GAME_URL`` has the server's address.

    Some packages have a client for their game, such as ``EchoEnv``. With that client, an action is
    ``EchoAction(message=action)``, and the parts of an observation are attributes.
    """

    def __init__(self):
        import os

        from openenv import GenericEnvClient

        client = GenericEnvClient(base_url=os.environ["GAME_URL"])
        self.client = client.sync()

    def reset(self, seed):
        result = self.client.reset(seed=seed)
        return result.observation["echoed_message"]

    def step(self, action):
        result = self.client.step({"message": action})
        text = result.observation["echoed_message"]
        return text, result.reward, result.done, False, {}

    # The run calls this method at its end. The connection stays open until then, over all resets.
    def close(self):
        self.client.close()


class Gsm8k:
    """A problem of GSM8K in Aviary. The methods call Aviary's tools.

    The first answer ends the problem.
    """

    async def reset(self, prompt, answer, **row):
        from aviary.envs.gsm8k import CalculatorEnv

        # Aviary reads the answer as a number, and GSM8K writes 1,400.
        number = answer.replace(",", "")
        self.problem = CalculatorEnv(None, str(prompt), number)
        await self.problem.reset()
        self.reward = 0.0
        self.done = False

    # This environment has no `step`, so each public method is a tool. The model reads the
    # docstrings and type hints of tools.
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

        # The model reads this error as the result of its call.
        if self.done:
            raise ValueError("the problem has ended")
        call = ToolCall.from_name(name, **arguments)
        action = ToolRequestMessage(tool_calls=[call])
        messages, reward, self.done, _ = await self.problem.step(action)
        self.reward += reward
        return messages[0].content

    def get_reward(self):
        return self.reward

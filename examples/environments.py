"""Environments of other packages, as glue of a few lines (docs/tools.md has the table).

``environment: "examples/environments.py:Sudoku"`` in a configuration names one. A reset/step
environment has two methods: ``reset`` returns the prompt, and ``step`` gets the text of a turn of
the model, and returns what Gymnasium's does: observation, reward, terminated, truncated, info.
"""


class Sudoku:
    """A game of GEM. Its board is in ``info["suffix"]``, which GEM's own wrappers append.

    These wrappers would also repeat the whole conversation in each observation.
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
        # Player 0 is the model, which knows what it wrote itself.
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
    """A game of TextArena for two. The opponent places its mark at random."""

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
    """A game of Gymnasium. Its actions are numbers, and its observations need words."""

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
    """A problem of SkyRL-gym. Its object serves one episode, and needs the columns of the row."""

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
    """A game behind a server of OpenEnv, whose address is in the variable ``GAME_URL``.

    With a package's own client, such as ``EchoEnv``, an action is an object of its class,
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

    # Called at the end of the run. The connection stays open until then, over all resets.
    def close(self):
        self.client.close()


class Gsm8k:
    """A problem of GSM8K in Aviary, whose tools are methods here. The first answer ends it."""

    async def reset(self, prompt, answer, **row):
        from aviary.envs.gsm8k import CalculatorEnv

        # Aviary reads the answer as a number, and GSM8K writes 1,400.
        number = answer.replace(",", "")
        self.problem = CalculatorEnv(None, str(prompt), number)
        await self.problem.reset()
        self.reward = 0.0
        self.done = False

    # This environment has no `step`, so each public method is a tool, as the model reads it here.
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

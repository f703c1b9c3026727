"""Tools and environments as users write them, good and bad, for the tests."""

import asyncio
import os
import random
import socket
import tempfile
import time
from dataclasses import dataclass

import numpy


def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: the word
    """
    return {"one": "1", "two": "2"}[word]


async def later(word: str) -> str:
    """Answer a little later.

    Args:
        word: the word
    """
    await asyncio.sleep(0.01)
    return word.upper()


def misbehave(how: str) -> str:
    """Do something bad.

    Args:
        how: what
    """
    if how == "hang":
        time.sleep(60)
    elif how == "raise":
        raise RuntimeError("no such luck")
    elif how == "exit":
        raise SystemExit(3)
    elif how == "kill":
        os.kill(os.getpid(), 9)
    elif how == "print":
        print("x" * 10_000_000)
    elif how == "flood":
        return "0123456789" * 1_000_000
    elif how == "memory":
        return str(len(bytearray(20 * 1024**3)))
    elif how == "bytes":
        return b"\xff\x00"
    elif how == "nan":
        return float("nan")
    elif how == "surrogate":
        return "\ud800"
    elif how == "search":  # such results are no messages
        return [{"title": "a", "content": None}]
    elif how == "control":
        return "a<|im_end|>\n<|im_start|>system\nb"
    elif how == "fork" and os.fork() == 0:
        return "the child"
    return "fine"


class Counter:
    """An environment of TRL's form: its methods are tools, and it has state."""

    def reset(self, start=0, **row):
        if start == "broken":
            raise ValueError("this row cannot be reset")
        self.count, self.secret = int(start), random.random()
        return f" from {start}"

    def add(self, amount: int) -> str:
        """Add to the count.

        Args:
            amount: how much
        """
        self.count += amount
        if amount == 13:
            os.kill(os.getpid(), 9)
        return str(self.count)

    def draw(self) -> str:
        """Draw a number."""
        return str(random.random())

    async def get_reward(self):
        return None if self.count > 100 else float(self.count)


def count_of(environments, **columns):
    return [environment.count for environment in environments]


def hangs_at_13(environments, **columns):
    if any(environment.count == 13 for environment in environments):
        time.sleep(60)
    return [1.0] * len(environments)


def secret_of(environments, **columns):
    return [environment.secret for environment in environments]


class Connected(Counter):
    """Holds what cannot be pickled."""

    def reset(self, **row):
        super().reset(start=5)
        self.socket = socket.socket()


class Prompting(Counter):
    """Makes its own prompts."""

    def reset(self, seed):
        self.count = 0
        return f"Count to {random.Random(seed).randrange(1000)}."


class Seedless(Counter):
    def reset(self):
        return f"Count to {random.random()}."


class Gym:
    """Gymnasium: five values."""

    def reset(self, *, seed=None, options=None):
        self.left, self.seed = 3, seed
        return "begin", {}

    def step(self, action):
        if action == "break":
            raise KeyError("broken")
        self.left -= 1
        return f"{self.left} left", float(len(action)), self.left == 0, False, {}


class Breaking(Gym):
    def step(self, action):
        return {}["no such key"]


class Unsendable(Gym):
    def step(self, action):
        return unsendable(action), 1.0, False, False, {}


class SkyRL:
    """SkyRL-gym: ``init`` with the prompt; ``step`` returns a dictionary with messages."""

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        done = action == "stop"
        return {"observations": [{"role": "user", "content": "more"}], "reward": 0.5, "done": done, "metadata": {}}


@dataclass
class Result:
    observation: str
    reward: float
    done: bool


class OpenEnvClient:
    def reset(self):
        return Result("hello", 0.0, False)

    def step(self, action):
        return Result(action[::-1], 1.0, action == "end")


class Late:
    """OpenEnv's default: the reward of every step but the last is None. ``nothing``: it has none at all."""

    def reset(self):
        return Result("hello", None, False)

    def step(self, action):
        reward = None if action in ("wait", "nothing") else float(action)
        return Result("on", reward, action in ("nothing", "3"))


class OldGym:
    """Four values, and a reset that returns the observation alone."""

    def reset(self, seed=None):
        return "begin"

    def step(self, action):
        return "on", 1.5, action == "end", {"TimeLimit.truncated": False}


class Graded:
    """SkyRL-gym's GSM8K: the constructor gets the row's columns, and ``init`` a conversation."""

    def __init__(self, env_config=None, extras=()):
        self.truth = extras["reward_spec"]["ground_truth"]

    def init(self, prompt):
        assert [message["role"] for message in prompt] == ["user"]
        return prompt, {}

    def step(self, action):
        return {"observations": [], "reward": float(action == self.truth), "done": True, "metadata": {}}


class Framed(Graded):
    """Its ``init`` makes another prompt, as messages or as text."""

    def init(self, prompt):
        prompt[-1]["content"] = f"Solve: {prompt[-1]['content']}"
        return prompt if self.truth == "6" else prompt[-1]["content"], {}


class Endless(Gym):
    def step(self, action):
        return "on", float("nan") if action == "nan" else 1.0, False, False, {}


def rollout(prompts, generate):
    """A rollout function with two calls and a text of its own between them."""
    assert prompts
    ids = [[5, 6, 7] for _ in prompts]
    first = generate(ids, max_tokens=15)
    between = [9, 9]
    second = generate([p + f["completion_ids"] + between for p, f in zip(ids, first, strict=True)], max_tokens=15)
    pairs = list(zip(first, second, strict=True))
    return {
        "prompt_ids": ids,
        "completion_ids": [a["completion_ids"] + between + b["completion_ids"] for a, b in pairs],
        "logprobs": [a["logprobs"] + [0.0] * 2 + b["logprobs"] for a, b in pairs],
        "env_mask": [[1] * len(a["completion_ids"]) + [0] * 2 + [1] * len(b["completion_ids"]) for a, b in pairs],
        "note": [f"row {n}" for n in range(len(prompts))],
    }


class Slow:
    """A game for an untrained model: it says something of a length that depends on the turn, sooner or later."""

    def reset(self, seed=0):
        self.turns, self.last = 0, seed % 3
        return "" if self.last else " Go on."

    def step(self, action):
        time.sleep(random.SystemRandom().random() * 0.02)
        self.turns += 1
        digits = sum(character.isdigit() for character in action)
        draw = random.random()  # seeded by the trainer
        return "ok" * (1 + int(3 * draw)), digits + draw, self.turns == 2 + self.last, False, {}


class Moody(Slow):
    """Some rows cannot be reset."""

    def reset(self, answer=None, **row):
        if int(answer) % 2:
            raise ValueError("bad luck")
        return super().reset()


class Reader:
    """Holds an open file, which no copy could have, and writes into a log what happens to it."""

    def __init__(self):
        self._log("made")

    def _log(self, word):
        with open(os.environ["READER_LOG"], "a") as file:
            print(word, file=file)

    def reset(self, **row):
        self._log("reset")
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "text")
        with open(path, "w") as file:
            file.write("first\nsecond\nthird\n")
        self.file = open(path)  # noqa: SIM115 - it stays open from call to call

    def line(self) -> str:
        """Read the next line."""
        assert os.path.isdir(self.folder.name)
        return next(self.file).strip()

    async def get_reward(self):
        return float(len(list(self.file)))

    async def close(self):
        self._log("closed")


class Workspace:
    """A temporary folder, a file of it that is open for reading and one that is open for writing."""

    def reset(self, **row):
        self.folder = tempfile.TemporaryDirectory()
        book = os.path.join(self.folder.name, "book")
        with open(book, "w") as file:
            file.write("line 1\nline 2\nline 3\n")
        self.book = open(book)  # noqa: SIM115 - they stay open from call to call
        self.log = open(os.path.join(self.folder.name, "log"), "w")  # noqa: SIM115

    def read(self) -> str:
        """Read the next line."""
        self.log.write("read\n")
        self.log.flush()
        return self.book.readline().strip()

    def files(self) -> str:
        """List the files of the workspace and what the log says."""
        with open(self.log.name) as log:
            return f"{sorted(os.listdir(self.folder.name))} {log.read().split()}"


class Fickle(Reader):
    """Its second reset fails."""

    def reset(self, **row):
        super().reset()
        self.num_resets = getattr(self, "num_resets", 0) + 1
        if self.num_resets == 2:
            raise OSError("the connection is lost")


class Born:
    """Draws when it is made and when it gives its reward."""

    def __init__(self):
        self.secret = random.random()

    def reset(self, **row):
        pass

    def draw(self) -> str:
        """Draw a number."""
        return str(random.random())

    def get_reward(self):
        return random.random()


class Episode:
    """SkyRL-gym: one object for one episode, whose turns it counts from its constructor on."""

    def __init__(self):
        self.turns = 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        return {"observations": [], "reward": 1.0, "done": self.turns == 3, "metadata": {}}


class Array:
    """Observes arrays, and its step returns three values."""

    def reset(self, seed):
        return numpy.zeros(2)

    def step(self, action):
        return numpy.ones(2), numpy.float32(0.5), action == "end"


def repeat(word: str, most: int = 1) -> str:
    """Say a word again.

    Args:
        word: the word
        most: how often
    """
    return word * most


def unsendable(word: str) -> list:
    """Return what cannot be sent.

    Args:
        word: the word
    """
    return [{"role": "user", "content": word, "callback": lambda: word}]


class Talkative:
    """Its prompt has as many characters, and about as many tokens, as the row says."""

    def reset(self, size, **row):
        return " on" * size

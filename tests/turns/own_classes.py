"""A script whose tools, environments and rewards use classes and connections of the script.

``test_own_classes.py`` runs it as ``__main__``.
"""

import asyncio
import enum
import os
import random
import sqlite3
import sys
import threading
import typing

import numpy
import pydantic

from grpo.rewards import RewardRunner, RewardSpec

MAIN = os.getpid()
database = sqlite3.connect(":memory:")
database.execute("create table capitals (country text, city text)")
database.execute("insert into capitals values ('Norway', 'Oslo'), ('Peru', 'Lima')")


class Person(pydantic.BaseModel):
    name: str
    age: int


class Grade(enum.Enum):
    GOOD = 1.0
    BAD = 0.0


Content = typing.TypeVar("Content")


class Box(typing.Generic[Content]):
    def __init__(self, content: Content):
        self.content = content


def judge(completions, grade, **columns):
    """The column holds members of the script's own Enum."""
    assert os.getpid() != MAIN
    found = []
    for completion, each in zip(completions, grade, strict=True):
        person = Person.model_validate_json(completion)
        found.append(Box(float(person.age) if each is Grade.GOOD else -1.0).content)
    return found


lock = threading.Lock()  # cannot be pickled


def judge_here(completions, grade, **columns):
    assert os.getpid() == MAIN and not lock.locked()
    return [each.value if each is Grade.GOOD else -1.0 for each in grade]


class Refuses:
    """Can be sent, and not be loaded."""

    def __reduce__(self):
        return fails, ()

    def __call__(self, completions, **columns):
        return [float(os.getpid() == MAIN)] * len(completions)


def fails():
    raise RuntimeError("only in the process that made it")


def describe(age: int) -> str:
    """Describe a person.

    Args:
        age: the age
    """
    assert os.getpid() != MAIN
    person = Box(Person(name="Ann", age=age)).content
    return f"{person.name} {person.age} {Grade(1.0).name}"


def capital(country: str) -> str:
    """Look a capital up.

    Args:
        country: the country
    """
    assert os.getpid() == MAIN
    (city,) = database.execute("select city from capitals where country = ?", (country,)).fetchone()
    return city


async def capital_later(country: str) -> str:
    """Look a capital up a little later.

    Args:
        country: the country
    """
    await asyncio.sleep(0.01)
    assert os.getpid() == MAIN
    return f"{cities[country]} {random.random():.3f} {numpy.random.random():.3f}"


class Cities(dict):
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("cannot pickle cities")


cities = Cities(Norway="Oslo", Peru="Lima")


class Game:
    """An environment of TRL's form with the script's classes as its state."""

    def reset(self, grade, **row):
        self.grade = grade
        self.people = Box([])
        return f" as {grade.name}"

    def add(self, age: int) -> str:
        """Add a person.

        Args:
            age: the age
        """
        assert self.grade is Grade.GOOD
        assert os.getpid() != MAIN
        self.people.content.append(Person(name="Bob", age=age))
        return str(len(self.people.content))

    def get_reward(self):
        return float(sum(person.age for person in self.people.content))


class Query:
    """An environment with a connection of the script, which refuses other threads."""

    def reset(self, **row):
        self.num_queries = 0

    def query(self, country: str) -> str:
        """Ask.

        Args:
            country: the country
        """
        self.num_queries += 1
        return capital(country)

    def get_reward(self):
        assert os.getpid() == MAIN
        return float(self.num_queries)


def look(completions, environments, **columns):
    """The environments themselves, each where it lives."""
    found = []
    for environment in environments:
        if hasattr(environment, "num_queries"):
            assert os.getpid() == MAIN
            found.append(environment.num_queries)
        else:
            assert os.getpid() != MAIN
            found.append(sum(p.age for p in environment.people.content) * (environment.grade is Grade.GOOD))
    return found


def score():
    """The scores of rewards that need no torch."""
    functions = {"judge": judge, "judge_here": judge_here, "refuses": Refuses()}
    specs = [RewardSpec(f"python:{name}", function=function) for name, function in functions.items()]
    person = Person(name="Ann", age=3).model_dump_json()
    with RewardRunner(specs) as runner:
        for _ in range(2):  # the second step finds the classes in the worker
            result = runner.score(["p"] * 3, [person] * 3, {"grade": [Grade.GOOD, Grade.BAD, Grade.GOOD]})
            print(result.values, result.failures, result.first_traceback)
        print(*runner.notes, sep="\n")


def converse(model):
    """What tools and environments answer to a scripted model, in the order in which it asks."""
    from conftest import load
    from test_conversations import play, results

    from grpo.turns.tools import Tools

    notes = []
    loaded = Tools.load

    def load_and_keep_notes(tools):
        loaded(tools)
        notes.extend(tools.notes)
        return tools

    Tools.load = load_and_keep_notes
    policy = load(model)
    objects = {"python:describe": describe, "python:capital": capital, "python:capital_later": capital_later}
    calls = ["<describe>3</describe><capital>Peru</capital>", "<capital_later>Norway</capital_later>"]
    turns = [*calls, "<capital>Mars</capital>", "end"]
    state = random.getstate()
    numpy_state = numpy.random.get_state()
    for completion in play(policy, [turns] * 2, f"tools={list(objects)}", objects=objects):
        print(results(completion), [call.failed for call in completion.calls])
    assert random.getstate() == state
    assert str(numpy.random.get_state()) == str(numpy_state)

    objects = {"python:game": Game, "python:query": Query, "python:describe": describe, "python:capital": capital}
    turns = [
        ["<add>3</add><capital>Peru</capital>", "<add>4</add>", "<describe>5</describe>", "end"],
        ["<query>Peru</query><capital>Norway</capital>", "<query>Mars</query>", "<describe>5</describe>", "end"],
    ]
    settings = ["environment={game: python:game, query: python:query}", "tools=[python:describe, python:capital]"]
    columns = [{"environment": "game", "grade": Grade.GOOD}, {"environment": "query", "grade": Grade.BAD}]
    rewards = [RewardSpec("python:look", function=look)]
    options = dict(objects=objects, columns=columns, prompts=["a", "b"], rewards=rewards)
    for completion in play(policy, turns, *settings, **options):
        print(results(completion), completion.environment_reward)
    print(play.result.values)
    print(*notes, sep="\n")


def train(model, folder):
    """A run with all of them."""
    from test_trainings import settings_of

    from grpo import train

    rows = [{"prompt": f"{number}?", "grade": Grade.GOOD} for number in range(8)]
    settings = settings_of(model, folder)
    settings = {key: value for key, value in settings.items() if not key.startswith("data.")}
    result = train(
        settings,
        dataset=rows,
        tools=[describe, capital, capital_later],
        environment_factory=Game,
        reward_functions=[judge_here, look],
    )
    print(sorted(name for name in result.metrics[-1] if name.startswith(("rewards/", "tools/"))))
    print([result.metrics[-1][f"rewards/{name}/mean"] for name in ("judge_here", "look", "Game")])


if __name__ == "__main__":
    if sys.argv[1] == "in a loop":

        async def in_a_loop():
            converse(sys.argv[2])

        asyncio.run(in_a_loop())
    else:
        {"score": score, "converse": converse, "train": train}[sys.argv[1]](*sys.argv[2:])

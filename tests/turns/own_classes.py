"""A script whose tools, environments and rewards use classes and connections of the script.

``test_own_classes.py`` runs it as ``__main__``.
"""

import enum
import os
import sqlite3
import sys
import threading
import typing

import pydantic

from grpo.rewards import RewardRunner, RewardSpec

MAIN = os.getpid()
database = sqlite3.connect(":memory:")


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
    return database.execute("select city from capitals where country = ?", (country,)).fetchone()


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


def look(completions, environments, **columns):
    """The environments themselves, where they live."""
    assert os.getpid() != MAIN
    found = []
    for environment in environments:
        found.append(sum(person.age for person in environment.people.content) * environment.grade.value)
    return found


def score():
    """The scores of rewards that need no torch."""
    functions = {"judge": judge, "judge_here": judge_here}
    specs = [RewardSpec(f"python:{name}", function=function) for name, function in functions.items()]
    person = Person(name="Ann", age=3).model_dump_json()
    with RewardRunner(specs) as runner:
        for _ in range(2):  # the second step finds the classes in the worker
            result = runner.score(["p"] * 3, [person] * 3, {"grade": [Grade.GOOD, Grade.BAD, Grade.GOOD]})
            print(result.values, result.failures, result.first_traceback)
        print(*runner.notes, sep="\n")


def converse(model):
    """What tools and an environment answer to a scripted model."""
    from conftest import load
    from test_conversations import play, results

    policy = load(model)
    objects = {"python:game": Game, "python:describe": describe, "python:capital": capital}
    settings = ["environment=python:game", "tools=[python:describe]"]
    rewards = [RewardSpec("python:look", function=look)]
    options = dict(objects=objects, columns=[{"grade": Grade.GOOD}], rewards=rewards)
    (completion,) = play(policy, [["<add>3</add><describe>5</describe>", "<add>4</add>", "end"]], *settings, **options)
    print(results(completion), play.result.values)
    try:
        play(policy, [["end"]], "tools=[python:capital]", objects=objects)
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    {"score": score, "converse": converse}[sys.argv[1]](*sys.argv[2:])

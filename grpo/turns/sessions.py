"""Tools and environments in the process that runs them. Imports no torch unless a tool does.

An environment never leaves its process. It is constructed once for each slot and reset for each completion that gets
the slot, as TRL does, so that a client of a server holds one session however many completions there are.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import random
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from grpo.rewards import functions
from grpo.system import UserError, first_line
from grpo.turns.builtin import TOOLS
from grpo.workers import then
from grpo.workers.host import CAUGHT

MAX_RESULT_LENGTH = 2**20
"""Characters of a tool's result that the trainer gets."""
NOT_TOOLS = ("reset", "get_reward")


@dataclasses.dataclass(frozen=True)
class Info:
    """Facts about a tool or an environment for the trainer, which does not import it."""

    name: str
    """The name of the function or of the class."""
    schemas: list[dict[str, Any]]
    """The schema of the tool, or those of the environment's methods, as chat templates take them."""
    source_files: dict[str, str]
    steps: bool = False
    """True for reset/step, where a whole turn of the model is an action; False: its methods are tools."""
    has_reward: bool = False
    takes_seed: bool = False

    @property
    def tools(self) -> list[str]:
        """The names of the tools."""
        return [schema["function"]["name"] for schema in self.schemas]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of one step of a reset/step environment."""

    observation: str | list[dict[str, str]]
    reward: float | None
    done: bool


class LoadedTool:
    """A tool with the ``args`` of its configuration (:class:`grpo.workers.host.Source`)."""

    def __init__(self, objects: Mapping[Hashable, Any], spec: str, args: dict[str, Any], function: Any):
        self._spec = spec
        if function is None:
            function = load_named("tool", spec, TOOLS)
        self._function = functools.partial(function, **args) if args else function

    def describe(self) -> Info:
        """Return the tool's schema. This imports transformers."""
        bare = self._function
        given = {}
        if isinstance(bare, functools.partial):
            given = bare.keywords
            bare = bare.func
        name = getattr(bare, "__name__", type(bare).__name__)
        return Info(name, [_schema(name, bare, given)], functions.source_files(self._spec, bare))

    def call(self, slot: int, name: str, arguments: dict[str, Any], seed: int) -> Any:
        """Return the result as the model reads it."""
        set_seed(seed)
        return then(self._function(**arguments), as_content)


class LoadedEnvironment:
    """A class of environments, and those of this process by slot (:class:`grpo.workers.host.Source`)."""

    def __init__(self, objects: Mapping[Hashable, Any], spec: str, make: Callable[[], Any] | None):
        self._spec = spec
        self._make = load_named("environment", spec, {}) if make is None else make
        self.slots: dict[int, Any] = {}

    def describe(self) -> Info:
        """Construct an environment for its facts. This imports transformers."""
        try:
            environment = self.slots[0] = self._make()
        except TypeError as error:
            raise ValueError(f"environment {self._make.__name__!r} must be made without arguments: {error}") from error
        name = type(environment).__name__
        begin = getattr(environment, "reset", None)
        steps = _steps(environment)
        if steps:
            begin = getattr(environment, "init", begin)
        if not callable(begin):
            raise ValueError(f"environment {name} has no method reset")
        methods = {} if steps else _methods(environment)
        return Info(
            name,
            [_schema(method, function, {}) for method, function in methods.items()],
            functions.source_files(self._spec, self._make),
            steps,
            has_reward=steps or callable(getattr(environment, "get_reward", None)),
            takes_seed=bool(_accepted(begin, {"seed": 0})),
        )

    def begin(self, slot: int, row: dict[str, Any], seed: int) -> Any:
        """Reset the environment of a slot for a row of the dataset. Returns what it adds to the prompt, or None."""
        if slot not in self.slots:
            set_seed(slot)
            self.slots[slot] = self._make()
        # One whose reset fails is not used again.
        environment = self.slots.pop(slot)
        set_seed(seed)
        steps = _steps(environment)
        if steps and hasattr(environment, "init"):  # SkyRL-gym
            found = environment.init(row["prompt"])
        else:
            if "seed" in inspect.signature(environment.reset).parameters:
                row = {"seed": seed % 2**31} | row
            found = environment.reset(**_accepted(environment.reset, row))

        def prompt_of(found: Any) -> str | list[dict[str, str]] | None:
            self.slots[slot] = environment
            if steps:
                found = found[0] if isinstance(found, tuple) else getattr(found, "observation", found)
            elif found is not None and not isinstance(found, str):
                raise TypeError(f"reset returned {type(found).__name__}: expected text or None")
            return None if found is None else as_content(found)

        return then(found, prompt_of)

    def call(self, slot: int, name: str, arguments: dict[str, Any], seed: int) -> Any:
        """Call a method as a tool. Returns the result as the model reads it."""
        method = getattr(self._environment(slot), name)
        set_seed(seed)
        return then(method(**arguments), as_content)

    def step(self, slot: int, action: str, seed: int) -> Any:
        """Give the text of a turn to a reset/step environment. Returns a :class:`StepResult`."""
        environment = self._environment(slot)
        set_seed(seed)
        return then(environment.step(action), _step_result)

    def reward(self, slot: int) -> Any:
        """Return the reward that the environment gives itself, if it has ``get_reward``."""
        get_reward = getattr(self._environment(slot), "get_reward", None)
        return then(get_reward(), as_reward) if callable(get_reward) else None

    async def close(self) -> None:
        """Close every environment that has ``close``."""
        for environment in self.slots.values():
            # The user's code: an error of one leaves the others.
            with contextlib.suppress(*CAUGHT):
                closed = getattr(environment, "close", bool)()
                if inspect.isawaitable(closed):
                    await closed
        self.slots.clear()

    def _environment(self, slot: int) -> Any:
        if slot not in self.slots:
            raise UserError("its environment was in a worker process that was killed")
        return self.slots[slot]


def load_named(kind: str, spec: str, builtin: Mapping[str, Any]) -> Any:
    """Load a function or class by its name: built-in, ``package.module:name`` or ``path/to/file.py:name``."""
    if spec in builtin:
        return builtin[spec]
    found = functions.load_object(spec, kind, ", ".join(builtin))
    if not callable(found):
        location, _, name = spec.rpartition(":")
        raise ValueError(f"{kind} {spec!r}: {location} has no function or class {name!r}")
    return found


def set_seed(seed: int) -> None:
    """Seed the global generators, so that an environment or tool that draws from them gives the same again."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _steps(environment: Any) -> bool:
    """True for reset/step environments; an environment of TRL may have a tool called ``step``, which returns text."""
    step = getattr(environment, "step", None)
    return callable(step) and inspect.signature(step).return_annotation not in (str, "str")


def _methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of the environment's class, which are its tools."""
    methods = {}
    for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction):
        if name not in NOT_TOOLS and not name.startswith("_"):
            methods[name] = getattr(environment, name)
    return methods


def _schema(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool, without the given arguments, which the model does not choose."""
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers has a class of its own for each mistake
        needs = "a tool needs type hints and a Google docstring with `Args:`; a method is no tool if it begins with _"
        raise ValueError(f"tool {name!r}: {first_line(error)} ({needs})") from error
    parameters = schema["function"]["parameters"]
    for argument in given:
        if parameters["properties"].pop(argument, None) is None:
            raise ValueError(f"tool {name!r} has no argument {argument!r}")
        if argument in parameters.get("required", ()):
            parameters["required"].remove(argument)
    return schema


def _accepted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values whose names a function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return values
    return {name: value for name, value in values.items() if name in parameters}


def _step_result(found: Any) -> StepResult:
    if isinstance(found, tuple):  # Gymnasium: observation, reward, terminated, truncated, info
        observation, reward, *flags, _ = found
        done = any(flags)
    elif isinstance(found, dict):  # SkyRL-gym
        observation = found["observations"]
        reward = found["reward"]
        done = found["done"]
    else:  # OpenEnv
        observation = found.observation
        reward = found.reward
        done = found.done
    is_empty = observation is None or observation == []
    return StepResult("" if is_empty else as_content(observation), as_reward(reward), bool(done))


def as_content(value: Any) -> str | list[dict[str, str]]:
    """A result as the model reads it: messages as they are, anything else as text."""
    is_messages = isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value)
    if is_messages:
        return [{"role": "user", **message, "content": as_content(message["content"])} for message in value]
    return str(value)[:MAX_RESULT_LENGTH].encode("utf-8", "replace").decode()  # without broken Unicode


def as_reward(value: Any) -> float | None:
    """A reward as a float; None for None, NaN and infinity: the completion has no reward then."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None

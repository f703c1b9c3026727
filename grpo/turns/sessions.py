"""Tools and environments in the process that runs them. Imports no torch unless a tool does.

An environment never leaves its process. It is constructed once for each slot and reset for each
completion that gets the slot, as TRL does, so that a client of a server holds one session however
many completions there are. Environments of SkyRL-gym have no reset: each completion gets a new one.
If the process is killed, its environments are gone, and their calls fail until the next reset.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.rewards import functions
from grpo.system import UserError, first_line
from grpo.turns.builtin import TOOLS
from grpo.workers import then

MAX_RESULT_LENGTH = 2**20
"""Characters of a tool's result that the trainer gets."""
NOT_TOOLS = ("reset", "get_reward", "close")

Message = dict[str, Any]
"""A chat message."""


@dataclass(frozen=True)
class Info:
    """Facts about a tool or an environment for the trainer, which does not import it."""

    name: str | None
    """The name of the function or of the class."""
    tools: dict[str, dict[str, Any]]
    """The schemas, as chat templates take them, by the names that the model calls: of one function,
    or of the environment's methods."""
    source_files: dict[str, str]
    steps: bool = False
    """True for reset/step, where a whole turn of the model is an action."""
    has_reward: bool = False
    takes_seed: bool = False
    key: Hashable = None
    """The key in the workers, which the trainer gives."""


class LoadedTool:
    """A tool with the ``args`` of its configuration (:class:`grpo.workers.host.Source`)."""

    def __init__(
        self,
        objects: Any,
        spec: str,
        args: dict[str, Any],
        function: Any,
    ):
        self._spec = spec
        function = function or load_named("tool", spec, TOOLS)
        # If the function is a partial already, the new one keeps its arguments.
        self._function = functools.partial(function, **args)

    def describe(self) -> Info:
        """Return the tool's schema. This imports transformers."""
        function = self._function.func
        return Info(
            function.__name__,
            _schema(function, self._function.keywords),
            functions.source_files(self._spec, function),
        )

    def call(
        self,
        slot: int,
        name: str,
        arguments: dict[str, Any],
        seed: int,
    ) -> Any:
        """Return the result as the model reads it."""
        set_seed(seed)
        tool = self._function
        # Not tool(**arguments): the model cannot choose an argument that is filled in.
        result = tool.func(*tool.args, **arguments, **tool.keywords)
        return then(result, as_text)


class LoadedEnvironment:
    """A class of environments, and those of this process (:class:`grpo.workers.host.Source`)."""

    def __init__(
        self,
        objects: Any,
        spec: str,
        make: Any,
    ):
        self._spec = spec
        self._make = make or load_named("environment", spec, {})
        self.slots: dict[int, Any] = {}
        """Row of the rollout -> its environment."""
        self._used_up: set[int] = set()
        """The slots whose environment is not reset again."""

    def describe(self) -> Info:
        """Construct an environment to read its facts. This imports transformers."""
        environment = self._make
        # A class of SkyRL-gym may need a row of the dataset to be constructed.
        if not _is_sky_rl(environment):
            environment = environment()
            self.slots[0] = environment  # to be closed
        kind = environment if inspect.isclass(environment) else type(environment)
        reset = environment.init if _is_sky_rl(environment) else environment.reset
        steps = _is_stepped(environment)
        tools = {}
        for name, _ in inspect.getmembers(kind, inspect.isfunction):
            is_tool = not name.startswith("_") and name not in NOT_TOOLS
            if is_tool and not steps:
                tools |= _schema(getattr(environment, name), {})
        return Info(
            kind.__name__,
            tools,
            functions.source_files(self._spec, self._make),
            steps,
            has_reward=steps or hasattr(environment, "get_reward"),
            takes_seed=bool(_accepted(reset, {"seed": 0})),
        )

    def reset(self, slot: int, row: dict[str, Any], seed: int) -> Any:
        """Reset the environment of a slot for a row of the dataset.

        Returns what the environment adds to the prompt: text, messages that replace it, or None.
        """
        closed = self._retire(slot) if slot in self._used_up else None
        return then(closed, lambda _: self._reset(slot, row, seed))

    def _reset(self, slot: int, row: dict[str, Any], seed: int) -> Any:
        if slot not in self.slots:
            # A constructor may draw, too. All draw the same, on any number of ranks.
            set_seed(0)
            extras = {}
            if _is_sky_rl(self._make):
                extras = _accepted(self._make, {"extras": row})
            self.slots[slot] = self._make(**extras)
        environment = self.slots[slot]
        is_sky_rl = _is_sky_rl(environment)
        # An environment of SkyRL-gym serves one episode, and one whose reset fails may be broken.
        self._used_up.add(slot)
        set_seed(seed)
        if is_sky_rl:
            returned = environment.init(_as_messages(row["prompt"]))
        else:
            # A reset that takes **row alone gets no seed, as in TRL.
            if "seed" in inspect.signature(environment.reset).parameters:
                row = {"seed": seed % 2**31} | row
            returned = environment.reset(**_accepted(environment.reset, row))

        def prompt_of(value: Any) -> str | list[Message] | None:
            if not is_sky_rl:
                self._used_up.discard(slot)
            if _is_stepped(environment):
                if isinstance(value, tuple):  # Gymnasium and SkyRL-gym: observation, info
                    value = value[0]
                value = getattr(value, "observation", value)  # OpenEnv
            elif value is not None and not isinstance(value, str):
                raise TypeError(f"reset returned {type(value).__name__}: expected text or None")
            if is_sky_rl:
                return _as_messages(value)
            return None if value is None else as_content(value)

        return then(returned, prompt_of)

    def call(
        self,
        slot: int,
        name: str,
        arguments: dict[str, Any],
        seed: int,
    ) -> Any:
        """Call a method as a tool. Returns the result as the model reads it."""
        method = getattr(self._environment(slot), name)
        set_seed(seed)
        return then(method(**arguments), as_text)

    def step(self, slot: int, action: str, seed: int) -> Any:
        """Give the text of a turn to a reset/step environment.

        Returns the observation as messages, the reward of the turn, and True at the game's end.
        """
        environment = self._environment(slot)
        set_seed(seed)
        return then(environment.step(action), _step_result)

    def get_reward(self, slot: int, seed: int) -> Any:
        """Return the reward that the environment gives itself."""
        environment = self._environment(slot)
        set_seed(seed)
        return then(environment.get_reward(), as_reward)

    async def close(self) -> None:
        """Close every environment that has ``close``."""
        closed = [self._retire(slot) for slot in list(self.slots)]
        await asyncio.gather(*filter(None, closed))

    def _retire(self, slot: int) -> Awaitable[None] | None:
        """Close the environment of a slot, which is not used again."""
        environment = self.slots.pop(slot)
        self._used_up.discard(slot)
        # This is the user's code: an error must not keep the others open. Most have no close().
        with contextlib.suppress(Exception, SystemExit):
            closed = environment.close()
            if inspect.isawaitable(closed):
                return _finish_quietly(closed)
        return None

    def _environment(self, slot: int) -> Any:
        if slot not in self.slots:
            raise UserError("its environment was in a worker process that was killed")
        return self.slots[slot]


async def _finish_quietly(closed: Awaitable[Any]) -> None:
    with contextlib.suppress(Exception, SystemExit):
        await closed


def load_named(kind: str, spec: str, builtin: Mapping[str, Any]) -> Any:
    """Load a function or class by its name.

    The name is built-in, ``package.module:name`` or ``path/to/file.py:name``.
    """
    if spec in builtin:
        return builtin[spec]
    found = functions.load_object(spec, kind, ", ".join(builtin))
    if not callable(found):
        location, _, name = spec.rpartition(":")
        raise ValueError(f"{kind} {spec!r}: {location} has no function or class {name!r}")
    return found


def set_seed(seed: int) -> None:
    """Seed the global generators, so that a tool that draws from them repeats its result."""
    # Every call imports it, since a tool that has not used it yet may import it later.
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _is_stepped(environment: Any) -> bool:
    """True for reset/step environments.

    An environment of TRL's form may have a tool called ``step``, which returns text.
    """
    step = getattr(environment, "step", None)
    if not callable(step):
        return False
    annotation = inspect.signature(step).return_annotation
    # The annotation is a text with `from __future__ import annotations`.
    return annotation not in (str, "str")


def _is_sky_rl(environment: Any) -> bool:
    """True for SkyRL-gym, whose environments begin with ``init`` and get the prompt."""
    return _is_stepped(environment) and hasattr(environment, "init")


def _schema(
    function: Callable[..., Any],
    given: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """The name and the schema of a tool.

    The schema lacks the given arguments, which the model cannot choose.
    """
    from transformers.utils import get_json_schema

    tool = f"tool {function.__name__!r}"
    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers has a class of its own for each mistake
        needs = "a tool needs type hints and a Google docstring with `Args:`"
        hint = f"{needs}; a method is no tool if it begins with _"
        raise ValueError(f"{tool}: {first_line(error)} ({hint})") from error
    parameters = schema["function"]["parameters"]
    properties = parameters["properties"]
    for argument in given:
        if properties.pop(argument, None) is None:
            raise ValueError(f"{tool} has no argument {argument!r}")
        if argument in parameters.get("required", ()):
            parameters["required"].remove(argument)
    return {schema["function"]["name"]: schema}


def _accepted(
    function: Callable[..., Any],
    values: dict[str, Any],
) -> dict[str, Any]:
    """The values whose names a function takes."""
    parameters = inspect.signature(function).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return values
    return {name: value for name, value in values.items() if name in parameters}


def _step_result(returned: Any) -> tuple[list[Message], float | None, bool]:
    """The observation as messages, the reward and True at the end, from what ``step`` returned."""
    # Gymnasium: observation, reward, terminated, truncated, info. Old Gym has no truncated.
    if isinstance(returned, tuple):
        observation, reward, *ends = returned
        ends = [end for end in ends if not isinstance(end, dict)]
    elif isinstance(returned, dict):  # SkyRL-gym
        observation = returned["observations"]
        reward = returned["reward"]
        ends = [returned["done"]]
    else:  # OpenEnv
        observation = returned.observation
        reward = returned.reward
        ends = [returned.done]
    is_empty = isinstance(observation, list) and not observation
    if observation is None or is_empty:  # the next turn begins all the same
        observation = ""
    if reward is not None:
        reward = float(reward)
    return _as_messages(observation), reward, any(ends)


def _as_messages(value: Any) -> list[Message]:
    """A prompt or an observation as messages: a text is one of the user's."""
    content = as_content(value)
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return content


def as_content(value: Any) -> str | list[Message]:
    """Prompt or observation of an environment: messages as they are, anything else as text.

    TypeError for a message whose content is a list of parts, which may be images.
    """
    is_list = isinstance(value, list) and value
    if is_list and all(isinstance(item, dict) and "content" in item for item in value):
        messages = []
        for message in value:
            if isinstance(message["content"], list):
                raise TypeError("the content of an environment's message is a list: expected text")
            content = as_text(message["content"])
            messages.append({"role": "user", **message, "content": content})
        return messages
    return as_text(value)


def as_text(value: Any) -> str:
    """A result as the model reads it; a list of mappings may be what a search has found."""
    # Broken Unicode, which no tokenizer takes, becomes question marks.
    text = str(value)[:MAX_RESULT_LENGTH]
    return text.encode("utf-8", "replace").decode()


def as_reward(value: Any) -> float | None:
    """A reward as a float; None for None, NaN and infinity: the completion has no reward then."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None

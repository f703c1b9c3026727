"""Tools and environments in the worker process that runs them. Imports no torch unless a tool does.

An environment never leaves its process. It is constructed once for each slot and reset for each
completion that gets the slot, as TRL does, so that a client of a server holds one session however
many completions there are. If the process is killed, its environments are gone, and their calls
fail until the next reset.
"""

import asyncio
import contextlib
import inspect
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.rewards import functions
from grpo.system import UserError
from grpo.turns.builtin import TOOLS
from grpo.workers import then

MAX_RESULT_LENGTH = 2**18
"""Characters of a tool's result that the trainer gets."""
NOT_TOOLS = ("reset", "get_reward", "close")


@dataclass(frozen=True)
class Info:
    """Facts about a tool or an environment for the trainer, which does not import it."""

    name: str
    """The name of the function or of the class."""
    tools: dict[str, dict[str, Any]]
    """The schemas, as chat templates take them, by the names that the model calls: of one function,
    or of the environment's methods."""
    source_files: dict[str, str]
    steps: bool = False
    """True for reset/step, where a whole turn of the model is an action."""
    has_reward: bool = False


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
        self._args = args
        self._function = function or load_named("tool", spec, TOOLS)

    def describe(self) -> Info:
        """Return the tool's schema. This imports transformers."""
        return Info(
            self._function.__name__,
            _schema(self._function, self._args),
            functions.source_files(self._spec, self._function),
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
        # Python refuses an argument that is given twice: the model cannot choose one of `args`.
        result = self._function(**arguments, **self._args)
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
        self.made: list[Any] = []
        """All environments, to be closed, also those whose reset has failed."""

    def describe(self) -> Info:
        """Construct an environment to read its facts. This imports transformers."""
        environment = self._make()
        self.slots[0] = environment
        self.made.append(environment)
        steps = _is_stepped(environment)
        tools = {}
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
            is_tool = not name.startswith("_") and name not in NOT_TOOLS
            if is_tool and not steps:
                tools |= _schema(getattr(environment, name), {})
        return Info(
            type(environment).__name__,
            tools,
            functions.source_files(self._spec, self._make),
            steps,
            has_reward=steps or hasattr(environment, "get_reward"),
        )

    def reset(self, slot: int, row: dict[str, Any], seed: int) -> Any:
        """Reset the environment of a slot for a row of the dataset.

        Returns the text that the environment adds to the prompt, or None.
        """
        # It returns to its slot if the reset succeeds. Else it may be broken, and the next reset
        # makes a new one.
        environment = self.slots.pop(slot, None)
        if environment is None:
            # A constructor may draw, too. All draw the same, on any number of ranks.
            set_seed(0)
            environment = self._make()
            self.made.append(environment)
        set_seed(seed)
        parameters = inspect.signature(environment.reset).parameters
        # A reset that takes **row alone gets no seed, as in TRL.
        if "seed" in parameters:
            row = {"seed": seed % 2**31} | row
        kinds = [parameter.kind for parameter in parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            row = {name: value for name, value in row.items() if name in parameters}
        returned = environment.reset(**row)

        def prompt_of(value: Any) -> str | None:
            self.slots[slot] = environment
            if _is_stepped(environment):
                if isinstance(value, tuple):  # Gymnasium: observation, info
                    value = value[0]
                value = getattr(value, "observation", value)  # OpenEnv
            elif value is not None and not isinstance(value, str):
                raise TypeError(f"reset returned {type(value).__name__}: expected text or None")
            return None if value is None else _as_observation(value)

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

        Returns the observation, the reward of the turn, and True at the game's end.
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
        closing = []
        for environment in self.made:
            # This is the user's code: an error must not keep the others open.
            with contextlib.suppress(Exception, SystemExit):
                closed = environment.close()
                if inspect.isawaitable(closed):
                    closing.append(closed)
        await asyncio.gather(*closing, return_exceptions=True)

    def _environment(self, slot: int) -> Any:
        if slot not in self.slots:
            raise UserError("its environment was in a worker process that was killed")
        return self.slots[slot]


def load_named(kind: str, spec: str, builtin: Mapping[str, Any]) -> Any:
    """Load a function or class by its name.

    The name is built-in, ``package.module:name`` or ``path/to/file.py:name``.
    """
    if spec in builtin:
        return builtin[spec]
    found = functions.load_object(spec, kind, ", ".join(builtin))
    if not callable(found):
        raise ValueError(f"{kind} {spec!r}: no function or class of that name")
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


def _schema(
    function: Callable[..., Any],
    given: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """The name and the schema of a tool.

    The schema lacks the given arguments, which the model cannot choose.
    """
    from transformers.utils import get_json_schema

    schema = get_json_schema(function)
    parameters = schema["function"]["parameters"]
    for argument in given:
        if parameters["properties"].pop(argument, None) is None:
            raise ValueError(f"tool {function.__name__!r} has no argument {argument!r}")
        if argument in parameters.get("required", ()):
            parameters["required"].remove(argument)
    return {schema["function"]["name"]: schema}


def _step_result(returned: Any) -> tuple[str, float | None, bool]:
    """The observation, the reward and True at the end, from what ``step`` returned."""
    if isinstance(returned, tuple):  # Gymnasium
        observation, reward, terminated, truncated, _ = returned
        is_done = terminated or truncated
    else:  # OpenEnv
        observation = returned.observation
        reward = returned.reward
        is_done = returned.done
    # Without an observation the next turn begins all the same.
    text = "" if observation is None else _as_observation(observation)
    return text, None if reward is None else float(reward), bool(is_done)


def _as_observation(value: Any) -> str:
    """An observation as text; TypeError for messages, whose roles the text would hide."""
    if isinstance(value, list):
        raise TypeError("an observation is a list: expected text")
    return as_text(value)


def as_text(value: Any) -> str:
    """A result as the model reads it."""
    # Broken Unicode, which no tokenizer takes, becomes question marks.
    text = str(value)[:MAX_RESULT_LENGTH]
    return text.encode("utf-8", "replace").decode()


def as_reward(value: Any) -> float | None:
    """A reward as a float; None for None, NaN and infinity: the completion has no reward then."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None

"""Tools and environments in the worker process that runs them. Imports no torch unless a tool does.

An environment never leaves its process. A slot is a row of the rollout: its environment is
constructed once, and reset for each completion that gets the row, as in TRL. So a client of a
server holds one session, however many steps the run has. If the process is killed, its environments
are gone, and their calls fail until the next reset.
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
from grpo.workers import convert_result

MAX_RESULT_LENGTH = 2**18
"""Maximum number of characters of a tool's result that are sent to the trainer."""
NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods of an environment that the model cannot call."""


@dataclass(frozen=True)
class Description:
    """A tool or an environment as the trainer knows it, which does not import the user's code."""

    name: str
    """The name of the function or of the class."""
    tools: dict[str, dict[str, Any]]
    """Name that the model calls -> JSON schema. Of a tool there is one, of an environment one for
    each method that is a tool."""
    source_files: dict[str, str]
    """Name for messages -> path."""
    is_stepped: bool = False
    """True for a reset/step environment, where a whole turn of the model is an action."""
    has_reward: bool = False
    """True if the environment gives a reward itself."""


class LoadedTool:
    """A tool in its worker, made by :class:`grpo.workers.protocol.Factory`.

    Args:
        spec: the name of the tool in the configuration.
        args: arguments from the configuration, which the model cannot choose.
        function: the function that a program passed. Default: the one that ``spec`` names.
    """

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

    def describe(self) -> Description:
        """Return the tool's schema. This imports transformers."""
        return Description(
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
        """Return the result as the model reads it.

        Args:
            slot: the row that calls. A tool has no state of a row, so the slot is not used.
        """
        set_seed(seed)
        # Python refuses an argument that is given twice: the model cannot choose one of `args`.
        result = self._function(**arguments, **self._args)
        return convert_result(result, as_text)


class LoadedEnvironment:
    """The environments of this process, made by :class:`grpo.workers.protocol.Factory`.

    Args:
        spec: the name of the environment in the configuration.
        factory: the class or function that a program passed. Default: the one that ``spec`` names.
    """

    def __init__(
        self,
        objects: Any,
        spec: str,
        factory: Any,
    ):
        self._spec = spec
        self._factory = factory or load_named("environment", spec, {})
        self.slots: dict[int, Any] = {}
        """Row of the rollout -> its environment."""
        self._to_close: list[Any] = []
        """All environments, also those whose reset has failed."""

    def describe(self) -> Description:
        """Construct an environment, and describe it. This imports transformers."""
        # A function may make the environment, so its class is known only from an object.
        environment = self._factory()
        self.slots[0] = environment
        self._to_close.append(environment)
        is_stepped = _is_stepped(environment)
        tools = {}
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
            is_tool = not name.startswith("_") and name not in NOT_TOOLS
            if is_tool and not is_stepped:
                # The bound method: its signature has no `self`.
                method = getattr(environment, name)
                tools |= _schema(method, {})
        return Description(
            type(environment).__name__,
            tools,
            functions.source_files(self._spec, self._factory),
            is_stepped,
            has_reward=is_stepped or hasattr(environment, "get_reward"),
        )

    def reset(self, slot: int, row: dict[str, Any], seed: int) -> Any:
        """Reset the environment of a slot.

        Returns the text that the environment adds to the prompt, or None.

        Args:
            row: the columns of a row of the dataset, and its prompt.
        """
        # The environment returns to its slot if the reset succeeds. Otherwise it may be broken, and
        # the next reset makes a new one.
        environment = self.slots.pop(slot, None)
        if environment is None:
            # A constructor may draw random numbers, too. All get the same seed, since the number of
            # ranks decides how many environments are constructed here.
            set_seed(0)
            environment = self._factory()
            self._to_close.append(environment)
        set_seed(seed)
        parameters = inspect.signature(environment.reset).parameters
        # A reset that takes **row alone gets no seed, as in TRL. Many generators of random numbers
        # refuse seeds of more than 32 bits.
        if "seed" in parameters:
            row = {"seed": seed % 2**31} | row
        kinds = [parameter.kind for parameter in parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            row = {name: value for name, value in row.items() if name in parameters}
        result = environment.reset(**row)

        def addition_to_prompt(value: Any) -> str | None:
            self.slots[slot] = environment
            if _is_stepped(environment):
                if isinstance(value, tuple):  # Gymnasium: observation, info
                    value = value[0]
                value = getattr(value, "observation", value)  # OpenEnv
            elif value is not None and not isinstance(value, str):
                raise TypeError(f"reset returned {type(value).__name__}: expected text or None")
            if value is None:
                return None
            return _as_observation(value)

        return convert_result(result, addition_to_prompt)

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
        return convert_result(method(**arguments), as_text)

    def step(self, slot: int, action: str, seed: int) -> Any:
        """Give the text of a turn to a reset/step environment as its action.

        Returns the observation, the reward of the turn, and True if the environment has ended.
        """
        environment = self._environment(slot)
        set_seed(seed)
        return convert_result(environment.step(action), _step_result)

    def get_reward(self, slot: int, seed: int) -> Any:
        """Return the reward that the environment gives itself, or None."""
        environment = self._environment(slot)
        set_seed(seed)
        return convert_result(environment.get_reward(), as_reward)

    async def close(self) -> None:
        """Close every environment that has ``close``."""
        closing = []
        for environment in self._to_close:
            # This is the user's code: an error must not keep the others open.
            with contextlib.suppress(Exception, SystemExit):
                closed = environment.close()
                if inspect.isawaitable(closed):
                    closing.append(closed)
        # Together: the trainer waits only a few seconds before it kills this process.
        await asyncio.gather(*closing, return_exceptions=True)

    def _environment(self, slot: int) -> Any:
        if slot not in self.slots:
            raise UserError("its environment was in a worker process that was killed")
        return self.slots[slot]


def load_named(kind: str, spec: str, builtin: Mapping[str, Any]) -> Any:
    """Return the function or class of a name.

    Args:
        kind: "tool" or "environment", for messages.
        spec: a key of ``builtin``, ``package.module:name`` or ``path/to/file.py:name``.

    Raises:
        ValueError: if there is none.
    """
    if spec in builtin:
        return builtin[spec]
    loaded = functions.load_object(spec, kind, ", ".join(builtin))
    if not callable(loaded):
        raise ValueError(f"{kind} {spec!r}: no function or class of that name")
    return loaded


def set_seed(seed: int) -> None:
    """Seed the global generators, so that a tool that draws from them repeats its result."""
    # numpy is imported here even if no tool has imported it yet: a tool may do so later, and would
    # then draw from an unseeded generator.
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _is_stepped(environment: Any) -> bool:
    """True for a reset/step environment.

    An environment of TRL's form may have a tool called ``step``, too, which is annotated as
    returning text.
    """
    step = getattr(environment, "step", None)
    if not callable(step):
        return False
    annotation = inspect.signature(step).return_annotation
    # With `from __future__ import annotations` the annotation is the text "str".
    return annotation not in (str, "str")


def _schema(
    function: Callable[..., Any],
    fixed_arguments: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """The name and the schema of a tool.

    The schema lacks the fixed arguments: the model cannot choose them, and need not know of them.
    """
    from transformers.utils import get_json_schema

    schema = get_json_schema(function)
    parameters = schema["function"]["parameters"]
    for argument in fixed_arguments:
        if parameters["properties"].pop(argument, None) is None:
            raise ValueError(f"tool {function.__name__!r} has no argument {argument!r}")
        if argument in parameters.get("required", ()):
            parameters["required"].remove(argument)
    return {schema["function"]["name"]: schema}


def _step_result(returned: Any) -> tuple[str, float | None, bool]:
    """The observation, the reward, and True at the end, from what ``step`` returned."""
    if isinstance(returned, tuple):  # Gymnasium
        observation, reward, terminated, truncated, _ = returned
        is_done = terminated or truncated
    else:  # OpenEnv
        observation = returned.observation
        reward = returned.reward
        is_done = returned.done
    # Without an observation the next turn begins all the same.
    text = "" if observation is None else _as_observation(observation)
    if reward is not None:
        reward = float(reward)
    return text, reward, bool(is_done)


def _as_observation(value: Any) -> str:
    """An observation as text.

    TypeError for a list: it holds messages, whose roles would be lost in the text of the list.
    """
    if isinstance(value, list):
        raise TypeError("an observation is a list: expected text")
    return as_text(value)


def as_text(value: Any) -> str:
    """The text of a result, as the model reads it."""
    # Broken Unicode, such as half of a surrogate pair, becomes question marks: no tokenizer takes
    # it.
    text = str(value)[:MAX_RESULT_LENGTH]
    return text.encode("utf-8", "replace").decode()


def as_reward(value: Any) -> float | None:
    """A reward as a float, or None for None, NaN and infinity: the completion has no reward."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None

"""Tools and environments in the worker process that runs them.

An environment never leaves its process. It has a slot, which is the index of its row in the
rollout. The environment of a slot is constructed once, and reset for each completion in that row,
as in TRL. So an environment that connects to a server keeps one session, however many steps the run
has. If the process is killed, its environments are lost. Calls of a lost environment fail until the
next reset.

This module imports no torch unless a tool does.
"""

import asyncio
import contextlib
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.rewards import functions
from grpo.system import UserError
from grpo.turns.builtin import TOOLS
from grpo.workers import convert_result

MAX_RESULT_LENGTH = 2**18
"""Largest number of characters of a tool's result that are sent to the trainer."""
NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods of an environment that the model cannot call."""


@dataclass(frozen=True)
class Description:
    """Facts about a tool or an environment for the trainer, which does not import user code."""

    name: str
    """The name of the function or of the class."""
    tools: dict[str, dict[str, Any]]
    """Name that the model calls -> JSON schema. A tool has one entry. An environment has one entry
    for each method that is a tool."""
    source_files: dict[str, str]
    """Name of a file in messages -> its path."""
    is_stepped: bool = False
    """True for a reset/step environment, where a whole turn of the model is an action."""
    has_reward: bool = False
    """True if the environment gives a reward."""
    needed_columns: frozenset[str] = frozenset()
    """Names of the columns without which ``reset`` cannot run."""
    shared_names: Sequence[str] = ()
    """Names in the class or its module that hold state, which its environments share."""


class LoadedTool:
    """A tool in its worker, made by :class:`grpo.workers.protocol.Factory`.

    Args:
        spec: the name of the tool in the configuration.
        args: arguments from the configuration, which the model cannot choose.
        function: the function that a program passed. Default: the function that ``spec`` names.
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
        function = function or TOOLS.get(spec)
        builtin = (
            f"built in are {', '.join(TOOLS)}; methods of an environment are tools by themselves; "
        )
        self._function = function or functions.load_object(spec, "tool", builtin)

    def describe(self) -> Description:
        """Return the description of the tool, with its schema. This imports transformers."""
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
        """Call the tool. Returns the result as text for the model.

        Args:
            slot: row of the rollout. It is not used, since a tool keeps no state for a row.
        """
        set_seed(seed)
        # Python raises if an argument is given twice, so the model cannot change one of `args`.
        result = self._function(**arguments, **self._args)
        return convert_result(result, as_text)


class LoadedEnvironment:
    """The environment of the configuration, loaded in this process, and its instances.

    Args:
        spec: the name of the environment in the configuration.
        factory: class or function that returns an instance, if a program passed one. Default: the
            class or function that ``spec`` names.
    """

    def __init__(
        self,
        objects: Any,
        spec: str,
        factory: Any,
    ):
        self._spec = spec
        self._factory = factory or functions.load_object(spec, "environment")
        self.slots: dict[int, Any] = {}
        """Row of the rollout -> its environment."""
        self._to_close: list[Any] = []
        """All environments that were constructed, also environments whose reset has failed."""

    def describe(self) -> Description:
        """Construct an environment, and describe it. This imports transformers."""
        # The factory may be a function, so the class is known only from an environment.
        environment = self._factory()
        self._to_close.append(environment)
        is_stepped = _is_stepped(environment)
        tools = {}
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
            is_tool = not name.startswith("_") and name not in NOT_TOOLS
            if is_tool and not is_stepped:
                # The bound method: its signature has no `self`.
                method = getattr(environment, name)
                if not method.__doc__:
                    raise ValueError(
                        f"{name} has no docstring, and every public method is a tool: the name of "
                        "a helper begins with _"
                    )
                tools |= _schema(method, {})
        return Description(
            type(environment).__name__,
            tools,
            functions.source_files(self._spec, self._factory),
            is_stepped,
            has_reward=is_stepped or hasattr(environment, "get_reward"),
            needed_columns=_needed_arguments(environment.reset) - {"prompt", "seed"},
            # Classes of Gymnasium have mappings such as `metadata`, which are constants. A reset
            # that is no method, such as a partial, has no code to look at.
            shared_names=_shared_names(environment)
            if inspect.ismethod(environment.reset) and not is_stepped
            else [],
        )

    def reset(self, slot: int, row: dict[str, Any], seed: int) -> Any:
        """Reset the environment of a slot.

        Returns the text that the environment adds to the prompt, or None.

        Args:
            row: the columns of a row of the dataset, and its prompt.
        """
        # The environment returns to its slot if the reset succeeds. After a failed reset it may be
        # broken, so the next reset constructs a new environment.
        environment = self.slots.pop(slot, None)
        if environment is None:
            # A constructor may draw random numbers, too. All constructors get the same seed, since
            # the number of ranks decides how many environments are constructed here.
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
        """Call a method of an environment as a tool. Returns the result as text for the model."""
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
        """Return the reward that the environment gives for its conversation, or None."""
        environment = self._environment(slot)
        set_seed(seed)
        return convert_result(environment.get_reward(), as_reward)

    async def close(self) -> None:
        """Close every environment that has ``close``."""
        closing = []
        for environment in self._to_close:
            # This is the user's code. Its error must not keep the other environments open.
            with contextlib.suppress(Exception, SystemExit):
                closed = environment.close()
                if inspect.isawaitable(closed):
                    closing.append(closed)
        # Async methods run at the same time, since the trainer waits only a few seconds before it
        # kills this process.
        await asyncio.gather(*closing, return_exceptions=True)

    def _environment(self, slot: int) -> Any:
        if slot not in self.slots:
            raise UserError("its environment was in a worker process that was killed")
        return self.slots[slot]


def set_seed(seed: int) -> None:
    """Seed the global random generators, so that a tool that draws from them repeats its result."""
    # numpy is imported here even if no tool has imported it yet: a tool may do so later, and would
    # then draw from an unseeded generator.
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _shared_names(environment: Any) -> list[str]:
    """Return the names of state that completions share: a list, a mapping or a set in the class of
    an environment, or a connection to a database there, in its module, or of the environment
    itself, which no ``reset`` has opened yet. An object there may hold the connection. Also the
    names of empty lists of the module, and of counters and lists that ``__init__`` begins with 0 or
    empty, which neither ``reset`` nor a method that it calls begins anew."""
    reset = inspect.unwrap(environment.reset)
    # What reset names, and what the methods name that it calls: the list grows in the loop.
    in_reset = ["reset"]
    for name in in_reset:
        for base in type(environment).__mro__:
            method = inspect.unwrap(vars(base).get(name))
            if inspect.isfunction(method):
                in_reset += set(method.__code__.co_names) - set(in_reset)
    of_class = vars(type(environment))
    of_environment = getattr(environment, "__dict__", {})
    names = []
    for name, value in {**reset.__globals__, **of_class, **of_environment}.items():
        # A list with a name in capitals is a constant.
        is_collection = isinstance(value, list | dict | set)
        is_variable = name in of_class and is_collection and not name.isupper()
        if name not in in_reset:
            # Another number is a setting, such as a limit, and another list is only read.
            is_counter = name in of_environment and isinstance(value, int)
            is_variable |= (is_collection or is_counter) and not value
        parts = [value, *getattr(value, "__dict__", {}).values()]
        has_connection = any(hasattr(type(part), "commit") for part in parts)
        # The file may have other classes of environments.
        is_shared = is_variable or (has_connection and not isinstance(value, type))
        if is_shared and not name.startswith("__"):
            names.append(name)
    return names


def _is_stepped(environment: Any) -> bool:
    """True for a reset/step environment, whose ``step`` takes a whole turn as an action.

    An environment in TRL's form may have a tool called ``step``, too. The return annotation of the
    tool is ``str``.
    """
    step = getattr(environment, "step", None)
    if not callable(step):
        return False
    annotation = inspect.signature(step).return_annotation
    # With `from __future__ import annotations` the annotation is the text "str".
    return annotation not in (str, "str")


def _needed_arguments(method: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the arguments without which a method cannot be called."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    )


def _schema(
    function: Callable[..., Any],
    fixed_arguments: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return the schema of a tool: name of the tool -> schema.

    The schema lacks the fixed arguments, since the model cannot choose them.
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
    """Split a result of ``step`` into the observation, the reward (None if there is none), and True
    if the episode has ended."""
    if isinstance(returned, tuple):  # Gymnasium
        observation, reward, terminated, truncated, _ = returned
        is_done = terminated or truncated
    else:  # OpenEnv
        observation = returned.observation
        reward = returned.reward
        is_done = returned.done
    # Without an observation, the model's next turn follows an empty text.
    text = "" if observation is None else _as_observation(observation)
    if reward is not None:
        reward = float(reward + 0.0)  # no text, also not that of a number
    return text, reward, bool(is_done)


def _as_observation(value: Any) -> str:
    """Return an observation as text.

    Raises TypeError for a list: it holds messages, and the text of the list would lose their roles.
    """
    if isinstance(value, list):
        raise TypeError("an observation is a list: expected text")
    return as_text(value)


def as_text(value: Any) -> str:
    """Return a result as text for the model."""
    # Broken Unicode, such as half of a surrogate pair, becomes question marks, since no tokenizer
    # accepts broken Unicode.
    text = str(value)[:MAX_RESULT_LENGTH]
    return text.encode("utf-8", "replace").decode()


def as_reward(value: Any) -> float | None:
    """Return a reward as a float. None, NaN and infinity give None, which means no reward. Text is
    a TypeError, also that of a number."""
    if value is None or not math.isfinite(value):
        return None
    return float(value)

"""Runs tools and environments, in a worker process or in the trainer's. It imports no torch unless a tool does.

An environment travels: each request brings it pickled, and the reply has it pickled again. So a call that hangs or
kills its worker costs nothing but itself, and rewards get the environment too. One that cannot be pickled, because it
holds a connection for example, stays in its worker.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import pickle
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from grpo.rewards import functions
from grpo.rewards.worker import CAUGHT, EventLoop
from grpo.system import first_line
from grpo.turns.builtin import TOOLS

MAX_MEMORY_BYTES = 8 * 1024**3
"""Of the data of one worker. A tool that asks for more gets Python's MemoryError."""
MAX_RESULT_LENGTH = 2**20
"""Characters of a tool's result that the trainer gets."""
NOT_TOOLS = ("reset", "get_reward")


@dataclasses.dataclass(frozen=True)
class Source:
    """The source from which a tool or an environment is loaded."""

    kind: str
    """``"tool"`` or ``"environment"``."""
    name: str
    """Built-in, ``package.module:name``, ``path/to/file.py:name``, or of an object that a program passed."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    row_name: str | None = None
    """The name of an environment in rows; None if there is only one."""

    def load(self) -> Any:
        builtin = TOOLS if self.kind == "tool" else {}
        if self.name in builtin:
            return builtin[self.name]
        found = functions.load_object(self.name, self.kind, ", ".join(builtin))
        if not callable(found):
            location, _, name = self.name.rpartition(":")
            raise ValueError(f"{self.kind} {self.name!r}: {location} has no function or class {name!r}")
        return found


@dataclasses.dataclass(frozen=True)
class EnvironmentInfo:
    """Facts about an environment for the trainer, which does not import its class."""

    class_name: str
    steps: bool
    """True for reset/step, where a whole turn of the model is an action; False: its methods are tools."""
    has_reward: bool
    takes_seed: bool
    schemas: list[dict[str, Any]]

    @property
    def methods(self) -> list[str]:
        """The names of its methods that are tools."""
        return [schema["function"]["name"] for schema in self.schemas]


@dataclasses.dataclass(frozen=True)
class Description:
    schemas: list[dict[str, Any]]
    """Of the tools of the configuration, as chat templates take them."""
    environments: dict[str | None, EnvironmentInfo]
    source_files: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Reply:
    """The result of one request about an environment or a tool."""

    environment: bytes | int | None = None
    """Pickled; a number if it stays where it is; None without one."""
    text: str | list[dict[str, str]] | None = None
    """The text or messages that the model reads: a result, an observation, or messages; of a failure what was wrong."""
    failed: bool = False
    seconds: float = 0.0
    reward: float | None = None
    done: bool = False


def _never_raises(method: Callable[..., Reply]) -> Callable[..., Reply]:
    """An exception of the user's code is a reply whose text is its last line."""

    @functools.wraps(method)
    def answer(*arguments: Any) -> Reply:
        try:
            return method(*arguments)
        except CAUGHT as error:
            return Reply(None, f"{type(error).__name__}: {first_line(error)}", failed=True)

    return answer


class ToolWorker:
    """Answers the requests of :class:`grpo.turns.tools.Tools`: a method and its arguments.

    Args:
        is_process: this is a process of its own. Otherwise it is the trainer's, whose memory is not
            limited, and which keeps each environment as it is.
    """

    def __init__(self, is_process: bool = True):
        self.tools: dict[str, Callable[..., Any]] = {}
        self.environments: dict[str | None, Callable[[], Any]] = {}
        self.kept = {}
        """Number -> an environment that cannot be pickled."""
        self._numbers = itertools.count()
        self._loop = EventLoop()
        self._files = {}
        self._is_process = is_process
        if is_process:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            soft = MAX_MEMORY_BYTES
            if hard != resource.RLIM_INFINITY:
                soft = min(soft, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def load(self, key: int, source: Source, own: Any) -> str | ValueError:
        """Load the user's ``own`` tool or environment (pickled, or as it is), or the one that ``source`` names.

        A ``ValueError`` is returned, not raised.
        """
        try:
            found = pickle.loads(own) if isinstance(own, bytes) else own
            if found is None:
                found = source.load()
            if source.kind == "environment":
                self.environments[source.row_name] = found
            else:
                self._add_tool(found, source.args)
            self._files |= functions.source_files(source.name, found)
        except CAUGHT as error:
            return _mistake(error)
        return "loaded"

    def _add_tool(self, function: Callable[..., Any], args: dict[str, Any]) -> None:
        bare = function
        while isinstance(bare, functools.partial):
            bare = bare.func
        name = getattr(bare, "__name__", type(bare).__name__)
        if name in self.tools:
            raise ValueError(f"two tools have the name {name!r}")
        if args:
            function = functools.partial(function, **args)
        self.tools[name] = function

    def describe(self) -> Description | ValueError:
        """The schemas of all tools. This imports transformers, for :func:`transformers.utils.get_json_schema`."""
        try:
            schemas = [_schema(name, function) for name, function in self.tools.items()]
            return Description(schemas, {n: self._info(n, f) for n, f in self.environments.items()}, self._files)
        except CAUGHT as error:
            return _mistake(error)

    def _info(self, name: str | None, factory: Callable[[], Any]) -> EnvironmentInfo:
        try:
            environment = factory()
        except TypeError as error:
            raise ValueError(f"environment {factory.__name__!r} must be made without arguments: {error}") from error
        kind = type(environment).__name__
        steps = _steps(environment)
        begin = getattr(environment, "reset", None)
        if steps:
            begin = getattr(environment, "init", begin)
        if not callable(begin):
            raise ValueError(f"environment {kind} has no method reset")
        methods = {} if steps else _methods(environment)
        has_reward = steps or callable(getattr(environment, "get_reward", None))
        return EnvironmentInfo(
            kind,
            steps,
            has_reward,
            takes_seed=bool(_accepted(begin, {"seed": 0})),
            schemas=[_schema(method, function) for method, function in methods.items()],
        )

    @_never_raises
    def begin(self, name: str | None, row: dict[str, Any], seed: int) -> Reply:
        """A new environment, reset for a row of the dataset. ``text``: what it adds to the prompt, or None."""
        _seed(seed)
        environment = self.environments[name]()
        steps = _steps(environment)
        init = getattr(environment, "init", None)
        if steps and callable(init):  # SkyRL-gym
            found = self._wait(init(row["prompt"]))
        else:
            reset = environment.reset
            if "seed" in inspect.signature(reset).parameters:
                row = {"seed": seed % 2**31} | row
            columns = _accepted(reset, row)
            found = self._wait(reset(**columns))

        if steps and isinstance(found, tuple):
            found = found[0]
        elif steps:
            found = getattr(found, "observation", found)
        elif found is not None and not isinstance(found, str):
            raise TypeError(f"reset returned {type(found).__name__}: expected text or None")
        text = None if found is None else _text(found)
        return Reply(self._store(environment), text)

    @_never_raises
    def call(self, environment: bytes | int | None, name: str, arguments: dict[str, Any], seed: int) -> Reply:
        """Call a tool of the configuration, or a method of the environment. An exception is a failed reply."""
        _seed(seed)
        environment = self._restore(environment)
        started = time.perf_counter()
        failed = False
        try:
            tool = _methods(environment).get(name) or self.tools.get(name)
            if tool is None:
                raise ValueError(f"Tool {name} not found.")
            result = self._wait(tool(**arguments))
            text = _text(result)
        except CAUGHT as error:
            text = _text(str(error) or type(error).__name__)
            failed = True
        seconds = time.perf_counter() - started
        return Reply(self._store(environment), text, failed, seconds)

    @_never_raises
    def step(self, environment: bytes | int, action: str, seed: int) -> Reply:
        """Give the text of a turn to a reset/step environment."""
        _seed(seed)
        environment = self._restore(environment)
        started = time.perf_counter()
        found = self._wait(environment.step(action))
        seconds = time.perf_counter() - started

        if isinstance(found, tuple):  # Gymnasium: observation, reward, terminated, truncated, info
            observation = found[0]
            reward = found[1]
            done = any(found[2:-1])
        elif isinstance(found, dict):  # SkyRL-gym
            observation = found["observations"]
            reward = found["reward"]
            done = found["done"]
        else:  # OpenEnv
            observation = found.observation
            reward = found.reward
            done = found.done
        is_empty = observation is None or observation == []
        return Reply(
            self._store(environment),
            "" if is_empty else _text(observation),
            seconds=seconds,
            reward=_number(reward),
            done=bool(done),
        )

    @_never_raises
    def end(self, environment: bytes | int) -> Reply:
        """The reward that an environment gives itself, if it has ``get_reward``. One that stayed here is closed."""
        found = self._restore(environment)
        get_reward, close = getattr(found, "get_reward", None), getattr(found, "close", None)
        try:
            return Reply(reward=_number(self._wait(get_reward())) if callable(get_reward) else None)
        finally:
            if isinstance(environment, int) and callable(close):
                self._wait(close())

    def _wait(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            return self._loop.run(result)
        return result

    def _store(self, environment: Any) -> bytes | int | None:
        if environment is None:
            return None
        if self._is_process:
            with contextlib.suppress(Exception):  # of any type: each object may raise its own
                return cloudpickle.dumps(environment)
        number = next(self._numbers)
        self.kept[number] = environment
        return number

    def _restore(self, environment: bytes | int | None) -> Any:
        if isinstance(environment, int):
            if environment not in self.kept:
                raise RuntimeError("it was in the worker that was killed")
            return self.kept.pop(environment)
        if environment is None:
            return None
        return pickle.loads(environment)


def _mistake(error: BaseException) -> ValueError:
    """As a message of one line, which a process without the user's classes can unpickle."""
    return ValueError(str(error) if type(error) is ValueError else f"{type(error).__name__}: {first_line(error)}")


def _seed(seed: int) -> None:
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
    if environment is None:
        return {}
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return {n: getattr(environment, n) for n, _ in found if n not in NOT_TOOLS and not n.startswith("_")}


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a tool, without the arguments that the configuration fills in."""
    from transformers.utils import get_json_schema

    given = function.keywords if isinstance(function, functools.partial) else {}
    try:
        schema = get_json_schema(function.func if isinstance(function, functools.partial) else function)
    except Exception as error:  # transformers has a class of its own for each mistake
        needs = "a tool needs type hints and a Google docstring with `Args:`; a method is no tool if it begins with _"
        raise ValueError(f"tool {name!r}: {first_line(error)} ({needs})") from error
    parameters = schema["function"]["parameters"]
    if unknown := given.keys() - parameters["properties"].keys():
        raise ValueError(f"tool {name!r} has no argument {sorted(unknown)[0]!r}")
    parameters["properties"] = {n: value for n, value in parameters["properties"].items() if n not in given}
    if "required" in parameters:
        parameters["required"] = [n for n in parameters["required"] if n not in given]
    return schema


def _accepted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values whose names a function takes."""
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return values
    return {name: value for name, value in values.items() if name in parameters}


def _text(value: Any) -> str | list[dict[str, str]]:
    """A result as the model reads it: messages as they are, anything else as text."""
    is_messages = isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value)
    if is_messages:
        return [{"role": "user", **m, "content": _text(m["content"])} for m in value]
    return str(value)[:MAX_RESULT_LENGTH].encode("utf-8", "replace").decode()  # without broken Unicode


def _number(value: Any) -> float | None:
    """A reward as a float; None for None, NaN and infinity: the completion has no reward then."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None

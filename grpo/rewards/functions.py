"""Load reward functions by their names in configurations, and read which arguments they take.

A name is a built-in name, ``package.module:function`` or ``path/to/file.py:function``.
"""

import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from grpo.system import first_line

_BUILTIN_NAMES = """
    accuracy format tag_groups pattern_answer exact_or_stripped soft_overlong countdown math_verify
    r1_zero reasoning_gym
"""
BUILTIN_REWARDS = dict.fromkeys(_BUILTIN_NAMES.split(), "grpo.rewards.builtin")
BUILTIN_REWARDS["python_tests"] = "grpo.rewards.code"
"""Name of a built-in reward -> the module that defines a function of that name. The module is
imported when the reward is loaded."""

ENVIRONMENT_PREFIX = "environment:"
"""Prefix in the name of a reward that an environment gives.

The name of the environment's class follows the prefix.
"""
OBJECT_PREFIX = "python:"
"""Prefix in the name of an object, such as a reward, that was passed to ``grpo.train``.

An object with this prefix cannot be imported by its name.
"""
FILE_MODULE_PREFIX = "grpo_reward_file_"
"""Prefix in the module name, in ``sys.modules``, of a file that was loaded by its path."""
SOURCE_ATTRIBUTE = "__grpo_source__"
"""Name of a global variable in a module that was loaded by its path.

The variable holds the bytes that the file had when it was loaded.
"""

ENVIRONMENTS_ARGUMENT = "environments"
"""Name of the argument for the environments of the completions.

A reward that takes this argument runs in the worker processes of the environments.
"""
TRAINER_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "environment_rewards",
    ENVIRONMENTS_ARGUMENT,
    "trainer_state",
    "log_metric",
    "log_extra",
)
"""Arguments that the trainer passes to a reward besides the columns.

A column with one of these names is not passed.
"""


def load_reward(spec: str) -> Callable:
    """Load a reward: ``fn(prompts, completions, **columns) -> list[float | None]``.

    Raises:
        ValueError: if the function does not exist, or its file cannot be imported. The message is
            one line.
    """
    if spec in BUILTIN_REWARDS:
        return getattr(importlib.import_module(BUILTIN_REWARDS[spec]), spec)
    if spec.startswith(ENVIRONMENT_PREFIX):
        from grpo.rewards.builtin import environment

        return environment
    function = load_object(spec, "reward", f"built in are {', '.join(BUILTIN_REWARDS)}; ")
    # A class is callable too, but a call of it returns an instance, and not a list of scores.
    if inspect.isclass(function):
        raise ValueError(f"reward {spec!r} is a class: name an instance of it")
    return function


def load_object(spec: str, kind: str, builtin: str = "") -> Any:
    """Load the function, the class or another callable object named ``package.module:name`` or
    ``path/to/file.py:name``.

    Args:
        kind: a noun for messages, such as "reward" or "tool".
        builtin: for messages, a clause on what is built in, with "; " at its end.

    Raises:
        ValueError: if the module cannot be imported, or has no function or class of that name. The
            message is one line.
    """
    location, _, name = spec.rpartition(":")
    if spec.startswith(OBJECT_PREFIX):
        # The saved configuration of an earlier run has the name of the object, but not the object.
        raise ValueError(
            f"{kind} {spec!r} was an object passed to grpo.train(): "
            "name one of a file, or pass it again"
        )
    if not location:
        raise ValueError(
            f"unknown {kind} {spec!r}: {builtin}"
            'your own is "package.module:name" or "path/to/file.py:name"'
        )
    path = _real_path(location)
    try:
        module = _import(location, path)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(
            f"{kind} {spec!r}: importing {location}{describe_error(error, path)}"
        ) from error
    loaded = getattr(module, name, None)
    if not callable(loaded):
        raise ValueError(f"{kind} {spec!r}: {location} has no function or class {name!r}")
    return loaded


def describe_error(error: BaseException, path: str) -> str:
    """Describe an error for a message, for example `` (line 3) raised KeyError: 'a'``.

    The line is left out if the error did not come from the user's file ``path``.
    """
    place = ""
    # The last frame in the file counts: its line called a library that raised, or raised itself.
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            place = f" (line {frame.lineno})"
    return f"{place} raised {type(error).__name__}: {first_line(error)}"


def _import(location: str, path: str) -> ModuleType:
    """Import the module ``location``, or the file ``path`` if the location ends in ``.py``."""
    is_file = location.endswith(".py")
    # A reward file can import modules from its own folder, as a script can. A module may be in the
    # working folder, which is not on sys.path: torchrun adds only the folder of its script.
    folder = os.path.dirname(path) if is_file else os.getcwd()
    if folder not in sys.path:
        # The folder goes last, so that no file of the user replaces a module of a library.
        sys.path.append(folder)
    if not is_file:
        return importlib.import_module(location)

    with open(path, "rb") as file:
        source = file.read()
    # A file is imported once, so that two functions of the file share its globals. It is imported
    # again if it has changed, as can happen while a notebook is open.
    name = FILE_MODULE_PREFIX + path.encode().hex()
    module = sys.modules.get(name)
    if getattr(module, SOURCE_ATTRIBUTE, None) == source:
        return module
    module = ModuleType(name)
    module.__file__ = path
    # The module is registered before it runs: pickle and dataclasses look a module up by name.
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    # The source is set last. After an error it is missing, so the next import runs the file again.
    setattr(module, SOURCE_ATTRIBUTE, source)
    return module


def _real_path(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def unique_names(specs: Collection[str]) -> list[str]:
    """Return a unique name for each reward, for metrics: ``fn`` for ``path/to/file.py:fn``.

    The second reward with the same name gets the suffix ``_2``, the third gets ``_3``.
    """
    names = []
    for spec in specs:
        last_part = spec.rpartition(":")[2]
        name = last_part
        number = 1
        while name in names:
            number += 1
            name = f"{last_part}_{number}"
        names.append(name)
    return names


class FunctionInfo:
    """Facts about a reward function, read from its signature.

    A worker process sends the facts to the trainer, which does not import the function.

    Args:
        args: the ``args`` of the function in the configuration.
    """

    def __init__(self, function: Callable, args: Mapping[str, Any]):
        module = getattr(function, "__module__", None)
        self.is_builtin = str(module).startswith("grpo.rewards.")
        # An object with an async ``__call__`` is async too.
        self.is_async = any(map(inspect.iscoroutinefunction, (function, function.__call__)))
        self.row_by_row = bool(getattr(function, "row_by_row", False))
        """True if the function asks, by ``fn.row_by_row = True``, to be called with one row at a
        time."""
        self.total_seconds = 0
        """Seconds per row to which a built-in reward limits itself. 0 means no limit."""
        self.has_kwargs = False
        """True if the function takes ``**kwargs``."""
        self.parameter_names = []
        """Names of the parameters, without ``*args`` and ``**kwargs``."""
        self.configurable = []
        """Names of the parameters that the trainer does not pass.

        In a built-in reward, these parameters are settings, and only ``args`` fills them. In a
        user's function, columns fill them too.
        """
        self.needed_columns = set()
        """Names of the columns without which the function cannot run."""
        self.source_files = {}
        """Files of the function (:func:`source_files`).

        :class:`grpo.rewards.calls.LoadedReward` fills them in.
        """
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                self.has_kwargs = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                self.parameter_names.append(name)
                if name not in TRAINER_ARGUMENTS:
                    self._add_configurable(name, args.get(name, parameter.default))

    def _add_configurable(self, name: str, value: Any) -> None:
        self.configurable.append(name)
        if not self.is_builtin:
            # Neither a default nor args fill it, so a column must.
            if value is inspect.Parameter.empty:
                self.needed_columns.add(name)
        elif name.endswith("column"):
            # This setting of a built-in reward names a column that the reward reads.
            self.needed_columns.add(str(value))
        elif name == "total_seconds":
            self.total_seconds = value

    def call_arguments(self, inputs: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call: all ``args``, and the inputs that the function takes.

        Args:
            inputs: the columns, and the arguments that the trainer passes.
            args: the ``args`` of the function in the configuration.
        """
        arguments = dict(args)
        for name, value in inputs.items():
            # A function that does not name environments is called where there are none.
            is_taken = name in self.parameter_names or (
                self.has_kwargs and name != ENVIRONMENTS_ARGUMENT
            )
            # A column does not fill a setting: a column named `value` would change the score.
            is_setting = name in args or (self.is_builtin and name in self.configurable)
            if is_taken and not is_setting:
                arguments[name] = value
        return arguments


def check_arguments(spec: str, function: Callable, args: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the ``args`` of a configuration suit the function.

    A built-in reward accepts only its settings, although it takes ``**columns``. A setting must
    have the type of its default, or the annotated type if the default is None or missing.
    """
    info = FunctionInfo(function, args)
    for name, value in args.items():
        what = f"reward {spec!r}: {name}"
        is_other_name = info.has_kwargs and name not in TRAINER_ARGUMENTS
        if name not in info.configurable and (info.is_builtin or not is_other_name):
            raise ValueError(
                f"reward {spec!r} has no argument {name!r} for its args; it has "
                f"{', '.join(info.configurable)}"
            )
        # Only the user knows which values a function of the user takes.
        if not info.is_builtin:
            continue

        parameter = inspect.signature(function).parameters[name]
        kind = type(parameter.default)
        if parameter.default in (None, parameter.empty):
            kind = parameter.annotation
        # isinstance() would take True for a number, since bool is a subclass of int.
        has_right_type = type(value) is kind
        if kind is float:
            has_right_type = type(value) in (int, float) and math.isfinite(value)
        if kind in (float, int, bool, str) and not has_right_type:
            raise ValueError(f"{what} must be of type {kind.__name__}, got {value!r}")
        # The reward adds the <> itself, and would find no answer in '<<answer>>'.
        is_bare = value is None or re.fullmatch(r"[^][<>/ ]+", str(value))
        if name == "tag" and not is_bare:
            raise ValueError(f"{what} must be a bare name such as 'answer' (no <>), got {value!r}")


def source_files(spec: str, function: Callable) -> dict[str, str]:
    """Return the files of a function: name of a file in messages -> its path.

    The first file is the file that ``spec`` names. If another file defines the function, that file
    comes second.
    """
    location = spec.rpartition(":")[0]
    named_file = _real_path(location)
    if not os.path.isfile(named_file):
        named_file = getattr(sys.modules.get(location), "__file__", None)
        # The name of a built-in reward, or of an object passed to grpo.train, names no file.
        if named_file is None:
            return {}
    files = {location: named_file}
    # An instance has the module of its class, which may belong to a library.
    if inspect.isfunction(function) or inspect.isclass(function):
        module = sys.modules.get(function.__module__)
        defining_file = getattr(module, "__file__", None) or named_file
        if os.path.realpath(defining_file) != os.path.realpath(named_file):
            files[f"{location}: {os.path.basename(defining_file)}"] = defining_file
    return files

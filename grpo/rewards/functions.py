"""Load reward functions by their names in configurations, and read which arguments they take.

A name is that of a built-in reward, ``package.module:function`` or ``path/to/file.py:function``.
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

BUILTIN_REWARDS = dict.fromkeys(
    (
        "accuracy",
        "format",
        "tag_groups",
        "pattern_answer",
        "exact_or_stripped",
        "soft_overlong",
        "countdown",
        "math_verify",
        "r1_zero",
        "reasoning_gym",
    ),
    "grpo.rewards.builtin",
)
BUILTIN_REWARDS["python_tests"] = "grpo.rewards.code"
"""Name of a built-in reward -> the module that defines a function of that name. The module is
imported when the reward is loaded."""

ENVIRONMENT_PREFIX = "environment:"
"""Prefix of the name of the reward that an environment gives itself. The name of its class follows.
"""
OBJECT_PREFIX = "python:"
"""Prefix of the name of a reward that a program passed to ``grpo.train`` as an object, which other
processes cannot import."""
FILE_MODULE_PREFIX = "grpo_reward_file_"
"""Prefix of the name in ``sys.modules`` of a file named by ``path/to/file.py:function``."""
SOURCE_ATTRIBUTE = "__grpo_source__"
"""Global of such a module: the bytes of its file when it was imported."""

ENVIRONMENTS_ARGUMENT = "environments"
"""The argument that makes a reward run in the processes of the environments."""
NOT_IN_KWARGS = (ENVIRONMENTS_ARGUMENT, "trainer_state", "log_metric", "log_extra")
"""Arguments that a reward gets only if it has a parameter of that name: rewards expect columns in
``**kwargs``."""
TRAINER_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "environment_rewards",
    *NOT_IN_KWARGS,
)
"""Arguments that the trainer passes to a reward besides the columns. A column of such a name is not
passed."""


def load_reward(spec: str) -> Callable:
    """Load a reward: ``fn(prompts, completions, **columns) -> list[float | None]``.

    Raises:
        ValueError: in one line, if the function does not exist or its file cannot be imported.
    """
    if spec in BUILTIN_REWARDS:
        return getattr(importlib.import_module(BUILTIN_REWARDS[spec]), spec)
    if spec.startswith(ENVIRONMENT_PREFIX):
        from grpo.rewards.builtin import environment

        return environment
    function = load_object(spec, "reward", ", ".join(BUILTIN_REWARDS))
    # A class is callable too, but a call with prompts makes an instance and no list of scores.
    if not callable(function) or inspect.isclass(function):
        location, _, name = spec.rpartition(":")
        raise ValueError(
            f"reward {spec!r}: {location} has no function {name!r}; of a class, name an instance"
        )
    return function


def load_object(spec: str, kind: str, builtin: str) -> Any:
    """Load the object named ``package.module:name`` or ``path/to/file.py:name``.

    Returns None if the module has no such name.

    Args:
        kind: a noun for messages, such as "reward" or "tool".
        builtin: the built-in names of this kind, for messages.

    Raises:
        ValueError: in one line, if the module cannot be imported.
    """
    location, _, name = spec.rpartition(":")
    if spec.startswith(OBJECT_PREFIX):
        # The configuration of an earlier run names the object, but cannot hold it.
        raise ValueError(
            f"{kind} {spec!r} was an object passed to grpo.train(): "
            "name one of a file, or pass it again"
        )
    if not location:
        builtin_names = f"built in are {builtin}; " if builtin else ""
        raise ValueError(
            f"unknown {kind} {spec!r}: {builtin_names}"
            'your own is "package.module:name" or "path/to/file.py:name"'
        )
    path = _real_path(location)
    try:
        module = _import(location, path)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(
            f"{kind} {spec!r}: importing {location}{describe_error(error, path)}"
        ) from error
    return getattr(module, name, None)


def describe_error(error: BaseException, path: str) -> str:
    """Describe an error, with its line in the user's file if it came from there.

    For example `` (line 3) raised KeyError: 'a'``.
    """
    place = ""
    # The last frame in the file wins: it is the line that called a library, or that raised.
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            place = f" (line {frame.lineno})"
    return f"{place} raised {type(error).__name__}: {first_line(error)}"


def _import(location: str, path: str) -> ModuleType:
    """Import a module by its name, or by its path if that ends in ``.py``."""
    is_file = location.endswith(".py")
    # A reward file can import modules of its own folder, as a script can. A module can lie in the
    # working folder, which torchrun does not put on the path: it puts the script's folder there.
    folder = os.path.dirname(path) if is_file else os.getcwd()
    if folder not in sys.path:
        # Last, so that no file of the user replaces a module of a library.
        sys.path.append(folder)
    if not is_file:
        return importlib.import_module(location)

    with open(path, "rb") as file:
        source = file.read()
    # Imported once, so that two functions of one file share its globals; but again if the file has
    # changed, as in a notebook.
    name = FILE_MODULE_PREFIX + path.encode().hex()
    module = sys.modules.get(name)
    if getattr(module, SOURCE_ATTRIBUTE, None) == source:
        return module
    module = ModuleType(name)
    module.__file__ = path
    # Before the module runs: pickle and dataclasses look a module up by name.
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    # Set last: a module that raised has no source, so that the next import runs its file again.
    setattr(module, SOURCE_ATTRIBUTE, source)
    return module


def _real_path(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def unique_names(specs: Collection[str]) -> list[str]:
    """Return the names of rewards in metrics, such as ``fn`` of ``path/to/file.py:fn``.

    The second reward of the same name gets ``_2``, and so on.
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

    The worker sends them to the trainer, which does not import the function.

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
        """Time limit per row that a built-in reward keeps by itself. Default: 0, no limit."""
        self.has_kwargs = False
        """True if the function takes ``**kwargs``."""
        self.parameter_names = []
        """Names of its other parameters."""
        self.configurable = []
        """The parameters that the trainer does not pass. In a built-in reward they are settings,
        which only ``args`` fills. In any other function columns fill them too."""
        self.needed_columns = set()
        """Columns without which it cannot run."""
        self.source_files = {}
        """See :func:`source_files`. Filled by :class:`grpo.rewards.calls.LoadedReward`."""
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
            # The setting of a built-in that names the column to read.
            self.needed_columns.add(str(value))
        elif name == "total_seconds":
            self.total_seconds = value

    def call_arguments(self, inputs: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call: all ``args``, and the inputs that the function takes.

        Args:
            inputs: columns, and the arguments of the trainer.
            args: see :class:`FunctionInfo`.
        """
        arguments = dict(args)
        for name, value in inputs.items():
            in_kwargs = self.has_kwargs and name not in NOT_IN_KWARGS
            is_taken = name in self.parameter_names or in_kwargs
            # Otherwise a column of the dataset named `value` would change the score.
            is_setting = name in args or (self.is_builtin and name in self.configurable)
            if is_taken and not is_setting:
                arguments[name] = value
        return arguments


def check_arguments(spec: str, function: Callable, args: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the ``args`` of a configuration suit the function.

    A built-in reward accepts only its settings, although it takes ``**columns``. The value of each
    must have the type of the setting's default, or the annotated one.
    """
    info = FunctionInfo(function, args)
    takes_other_names = info.has_kwargs and not info.is_builtin
    for name, value in args.items():
        what = f"reward {spec!r}: {name}"
        is_other_name = takes_other_names and name not in TRAINER_ARGUMENTS
        if name not in info.configurable and not is_other_name:
            names = ", ".join(info.configurable)
            raise ValueError(
                f"reward {spec!r} has no argument {name!r} for its args; it has {names}"
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
    """Return the paths of a function's files, by their names in messages.

    These are the file that ``spec`` names, and the file that defines the function if it is another.
    """
    location = spec.rpartition(":")[0]
    named_file = _real_path(location)
    if not os.path.isfile(named_file):
        named_file = getattr(sys.modules.get(location), "__file__", None)
        # The name of a built-in reward, or of an object passed to grpo.train, names no file.
        if named_file is None:
            return {}
    files = {location: named_file}
    # The module of an instance is that of its class, which may be a library's.
    if inspect.isfunction(function) or inspect.isclass(function):
        module = sys.modules.get(function.__module__)
        defining_file = getattr(module, "__file__", None) or named_file
        if os.path.realpath(defining_file) != os.path.realpath(named_file):
            files[f"{location}: {os.path.basename(defining_file)}"] = defining_file
    return files

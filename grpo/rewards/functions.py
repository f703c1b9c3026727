"""Find reward functions by the names that configurations use, and tell what a function takes.

A name is built-in, ``package.module:function`` or ``path/to/file.py:function``.
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

BUILTIN = dict.fromkeys(
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
BUILTIN["python_tests"] = "grpo.rewards.code"
"""Name -> the module that defines a function of that name. It is imported when the reward is
loaded."""

ENVIRONMENT_PREFIX = "environment:"
"""Begins the name of the reward that an environment gives itself; then comes the name of its class.
"""
OBJECT_PREFIX = "python:"
"""Begins the name of a reward that a program passed to ``grpo.train`` as an object, which other
processes cannot import."""
FILE_MODULE_PREFIX = "grpo_reward_file_"
"""Begins the name in ``sys.modules`` of a file named by ``path/to/file.py:function``."""
SOURCE = "__grpo_source__"
"""Global of such a module: the bytes of its file when it was imported."""

ENVIRONMENTS = "environments"
"""The argument that makes a reward run where the environments live."""
ONLY_IF_NAMED = (ENVIRONMENTS, "trainer_state", "log_metric", "log_extra")
"""Arguments that a reward gets only if it has a parameter of that name: rewards expect columns in
``**kwargs``."""
TRAINER_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "environment_rewards",
    *ONLY_IF_NAMED,
)
"""The arguments that the trainer passes to a reward besides the columns. A column of such a name is
not passed."""


def load_reward(spec: str) -> Callable[..., Any]:
    """Load ``fn(prompts, completions, **columns) -> list[float | None]``.

    Raises:
        ValueError: in one line, if the function does not exist or its file cannot be imported.
    """
    if spec in BUILTIN:
        return getattr(importlib.import_module(BUILTIN[spec]), spec)
    location, _, name = spec.rpartition(":")
    if spec.startswith(ENVIRONMENT_PREFIX):
        from grpo.rewards.builtin import environment

        return environment
    # A class would be called with the prompts, and what it returns is no list of scores.
    function = load_object(spec, "reward", ", ".join(BUILTIN))
    if not callable(function) or inspect.isclass(function):
        missing = f"{location} has no function {name!r}"
        raise ValueError(f"reward {spec!r}: {missing}; of a class, name an instance")
    return function


def load_object(spec: str, kind: str, builtin: str) -> Any:
    """The object named ``package.module:name`` or ``path/to/file.py:name``; None if its module has
    no such name.

    Args:
        kind: what it is, for messages.
        builtin: the built-in names, for messages.

    Raises:
        ValueError: in one line, if its module cannot be imported.
    """
    location, _, name = spec.rpartition(":")
    if spec.startswith(OBJECT_PREFIX):
        remedy = "name one of a file, or pass it again"
        raise ValueError(f"{kind} {spec!r} was an object passed to grpo.train(): {remedy}")
    if not location:
        known = f"built in are {builtin}; " if builtin else ""
        own = 'your own is "package.module:name" or "path/to/file.py:name"'
        raise ValueError(f"unknown {kind} {spec!r}: {known}{own}")
    path = _real_path(location)
    try:
        module = _import(location, path)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(f"{kind} {spec!r}: importing {location}{raised(error, path)}") from error
    return getattr(module, name, None)


def raised(error: BaseException, path: str) -> str:
    """An error, and the line of the user's file that it came from, if any: `` (line 3) raised
    KeyError: 'a'``.
    """
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            place = f" (line {frame.lineno})"
    return f"{place} raised {type(error).__name__}: {first_line(error)}"


def _import(location: str, path: str) -> ModuleType:
    """Import a module by its name, or by its path if that ends in ``.py``."""
    is_file = location.endswith(".py")
    # A reward file can import modules of its own folder, as a script can. torchrun puts the
    # script's folder on the path, not the working folder.
    folder = os.path.dirname(path) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    if not is_file:
        return importlib.import_module(location)

    with open(path, "rb") as file:
        source = file.read()
    # Two functions of one file share its globals. In a notebook the file may have changed.
    name = FILE_MODULE_PREFIX + path.encode().hex()
    known = sys.modules.get(name)
    if getattr(known, SOURCE, None) == source:
        return known
    module = ModuleType(name)
    module.__file__ = path
    # Before the module runs: pickle and dataclasses look a module up by name.
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    # A module that raised has no source, so that the next import runs its file again.
    setattr(module, SOURCE, source)
    return module


def _real_path(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def unique_names(specs: Collection[str]) -> list[str]:
    """The names of rewards in metrics: ``fn`` of ``path/to/file.py:fn``.

    The second of the same name gets ``_2``, and so on.
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
    """Facts about a reward function, also for the trainer, which does not import the function.

    Args:
        args: those of the configuration.
    """

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]):
        module = getattr(function, "__module__", None)
        self.is_builtin = str(module).startswith("grpo.rewards.")
        # An object with an async ``__call__`` is async too.
        self.is_async = any(map(inspect.iscoroutinefunction, (function, function.__call__)))
        self.row_by_row = bool(getattr(function, "row_by_row", False))
        """True if the function asks, by ``fn.row_by_row = True``, to be called with one row at a
        time."""
        self.total_seconds = 0
        """The time limit per row that a built-in reward keeps by itself; 0 if it has none."""
        self.takes_any = False
        """True if it takes ``**kwargs``."""
        self.named = []
        """The arguments that it names."""
        self.configurable = []
        """The arguments among these that the trainer does not pass. In a built-in reward they are
        settings, which only ``args`` fills. In any other function columns fill them too."""
        self.needed_columns = set()
        """The columns that it cannot run without."""
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                self.takes_any = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                self.named.append(name)
                if name not in TRAINER_ARGUMENTS:
                    self._add_configurable(name, args.get(name, parameter.default))

    def _add_configurable(self, name: str, value: Any) -> None:
        self.configurable.append(name)
        if not self.is_builtin:
            if value is inspect.Parameter.empty:
                self.needed_columns.add(name)
        elif name.endswith("column"):
            self.needed_columns.add(str(value))
        elif name == "total_seconds":
            self.total_seconds = value

    def passed(self, available: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call: all of ``args``, which the configuration gives, and those
        of ``available`` (columns, and what the trainer gives) that the function takes besides.
        """
        passed = dict(args)
        for name, value in available.items():
            is_taken = name in self.named or (self.takes_any and name not in ONLY_IF_NAMED)
            is_setting = name in args or (self.is_builtin and name in self.configurable)
            if is_taken and not is_setting:
                passed[name] = value
        return passed


def check_arguments(spec: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the ``args`` of a configuration suit the function.

    A built-in accepts its settings alone, although it takes ``**columns``, and each with a value of
    its type: that of the default, or the annotated one.
    """
    info = FunctionInfo(function, args)
    takes_any = info.takes_any and not info.is_builtin
    for name, value in args.items():
        what = f"reward {spec!r}: {name}"
        if name not in info.configurable and (not takes_any or name in TRAINER_ARGUMENTS):
            known = ", ".join(info.configurable)
            raise ValueError(
                f"reward {spec!r} has no argument {name!r} for its args; it has {known}"
            )
        # What another function does with its arguments is not known here.
        if not info.is_builtin:
            continue

        parameter = inspect.signature(function).parameters[name]
        kind = type(parameter.default)
        if parameter.default in (None, parameter.empty):
            kind = parameter.annotation
        # bool is a subclass of int, and True is no number here.
        is_right = type(value) is kind
        if kind is float:
            is_right = type(value) in (int, float) and math.isfinite(value)
        if kind in (float, int, bool, str) and not is_right:
            raise ValueError(f"{what} must be of type {kind.__name__}, got {value!r}")
        is_bare = value is None or re.fullmatch(r"[^][<>/ ]+", str(value))
        if name == "tag" and not is_bare:
            raise ValueError(f"{what} must be a bare name such as 'answer' (no <>), got {value!r}")


def source_files(spec: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return paths by their names in messages: of the file that ``spec`` names and, if another one
    defines the function, of that.
    """
    location = spec.rpartition(":")[0]
    named = _real_path(location)
    if not os.path.isfile(named):
        named = getattr(sys.modules.get(location), "__file__", None)
        if named is None:
            return {}
    files = {location: named}
    # The module of an instance is that of its class, which may be a library's.
    if inspect.isfunction(function) or inspect.isclass(function):
        defining = getattr(sys.modules.get(function.__module__), "__file__", None) or named
        if os.path.realpath(defining) != os.path.realpath(named):
            files[f"{location}: {os.path.basename(defining)}"] = defining
    return files

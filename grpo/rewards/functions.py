"""Find reward functions by the names that configurations use, and tell what a function takes.

A name is built-in, ``package.module:function``, ``path/to/file.py:function`` or ``classifier:<model>``.
"""

import importlib
import importlib.machinery
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from grpo.system import first_line

_IN_BUILTIN = (
    "accuracy", "format", "tag_groups", "pattern_answer", "exact_or_stripped", "soft_overlong", "countdown",
    "math_verify", "r1_zero", "reasoning_gym",
)  # fmt: skip
BUILTIN: dict[str, str] = dict.fromkeys(_IN_BUILTIN, "grpo.rewards.builtin") | {"python_tests": "grpo.rewards.code"}
"""Name -> the module that defines a function of that name. The module is imported when the reward is loaded."""

CLASSIFIER_PREFIX = "classifier:"
ENVIRONMENT_PREFIX = "environment:"
"""Begins the name of the reward that an environment gives itself; then comes the name of its class."""
OBJECT_PREFIX = "python:"
"""Begins the name of a reward that a program passed to ``grpo.train`` as an object, which others cannot import."""
ENVIRONMENTS = "environments"
"""The argument that makes a reward run where the environments live."""
ONLY_IF_NAMED = (ENVIRONMENTS, "trainer_state", "log_metric", "log_extra")
"""Arguments that a reward gets only if it has a parameter of that name: rewards expect columns in ``**kwargs``."""
TRAINER_ARGUMENTS = (
    "prompts", "completions", "completion_ids", "environment_names", "environment_rewards", *ONLY_IF_NAMED,
)  # fmt: skip
"""The arguments that the trainer passes to a reward besides the columns. A column of such a name is not passed."""
SOURCE = "__grpo_source__"
"""Global of such a module: the bytes of its file when it was imported."""
FILE_MODULE_PREFIX = "grpo_reward_file_"
"""Begins the name in ``sys.modules`` of a file named by ``path/to/file.py:function``."""


def load_reward(spec: str) -> Callable[..., Any]:
    """Load ``fn(prompts, completions, **columns) -> list[float | None]``.

    Raises:
        ValueError: in one line, if the function does not exist or its file cannot be imported.
    """
    spec = str(spec).strip()
    if spec.startswith(CLASSIFIER_PREFIX):
        from grpo.rewards.classifier import ClassifierReward  # imports torch, which reward workers do not need

        return ClassifierReward(spec[len(CLASSIFIER_PREFIX) :])
    if spec in BUILTIN:
        return getattr(importlib.import_module(BUILTIN[spec]), spec)
    if spec.startswith(ENVIRONMENT_PREFIX):
        from grpo.rewards.builtin import EnvironmentReward

        return EnvironmentReward(spec[len(ENVIRONMENT_PREFIX) :])
    function = load_object(spec, "reward", ", ".join(BUILTIN))
    if not callable(function) or inspect.isclass(function):
        location, _, name = spec.rpartition(":")
        raise ValueError(f"reward {spec!r}: {location} has no function {name!r}; of a class, name an instance")
    return function


def load_object(spec: str, kind: str, builtin: str) -> Any:
    """The object named ``package.module:name`` or ``path/to/file.py:name``; None if its module has no such name.

    ``kind``: what it is, and ``builtin``: what there is besides, for messages. ValueError if it cannot be imported.
    """
    location, _, name = spec.rpartition(":")
    if spec.startswith(OBJECT_PREFIX):
        raise ValueError(f"{kind} {spec!r} was an object passed to grpo.train(): name one of a file, or another")
    if not location:
        own = 'your own is "package.module:name" or "path/to/file.py:name"'
        raise ValueError(f"unknown {kind} {spec!r}: " + f"built in are {builtin}; " * bool(builtin) + own)
    is_file = location.endswith(".py") or os.sep in location
    try:
        module = _import_file(location) if is_file else _import_module(location)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        own_path = os.path.realpath(os.path.expanduser(location))
        raise ValueError(f"{kind} {spec!r}: importing {location}{raised(error, own_path)}") from error
    return getattr(module, name, None)


def raised(error: BaseException, path: str) -> str:
    """An error, and the line of the user's file that it came from, if any: `` (line 3) raised KeyError: 'a'``."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f" (line {lines[-1]})" if lines else ""
    return f"{place} raised {type(error).__name__}: {first_line(error)}"


def _import_file(path: str) -> ModuleType:
    path = os.path.realpath(os.path.expanduser(path))
    name = FILE_MODULE_PREFIX + path.encode().hex()  # two functions of one file share its globals
    with open(path, "rb") as file:
        source = file.read()
    if name in sys.modules and sys.modules[name].__dict__.get(SOURCE) == source:  # in a notebook it may have changed
        return sys.modules[name]
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))  # a reward file can import modules of its own folder, as a script can
    loader = importlib.machinery.SourceFileLoader(name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
    module.__dict__[SOURCE] = source
    sys.modules[name] = module  # before the module runs: pickle and dataclasses look a module up by name
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # torchrun puts the script's folder on the path, not the working folder
    return importlib.import_module(name)


def unique_names(specs: Collection[str]) -> list[str]:
    """The names of rewards in metrics: ``fn`` of ``path/to/file.py:fn``, the last part of a classifier's path.

    The second of the same name gets ``_2``, and so on.
    """
    names: list[str] = []
    for spec in specs:
        base = spec.rstrip("/").rpartition(":")[2].rpartition("/")[2]
        candidates = [base, *(f"{base}_{number}" for number in range(2, len(specs) + 1))]
        names.append(next(name for name in candidates if name not in names))
    return names


@dataclass(frozen=True)
class FunctionInfo:
    """Properties of a loaded reward, for the training process, which does not import the function."""

    is_async: bool
    row_by_row: bool
    """True if the function asks, by ``fn.row_by_row = True``, to be called with one row at a time."""
    takes_environments: bool
    needed_columns: frozenset[str]
    source_files: dict[str, str]
    """Name for messages -> path of the file that the reward's name points to, and of another that defines the function.
    Empty for built-in rewards."""


def describe(spec: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> FunctionInfo:
    """The properties of a function with the ``args`` of its configuration."""
    call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    row_by_row = bool(getattr(function, "row_by_row", False))
    return FunctionInfo(
        is_async,
        row_by_row,
        takes_environments(function),
        _needed_columns(function, arguments),
        source_files(spec, function),
    )


def takes_environments(function: Callable[..., Any]) -> bool:
    """True for a reward that has a parameter ``environments``."""
    return ENVIRONMENTS in _parameters(function)[0]


def source_files(spec: str, function: Callable[..., Any]) -> dict[str, str]:
    """Name for messages -> path of the file that a name points to, and of another that defines the function."""
    location = spec.strip().rpartition(":")[0]
    path = os.path.realpath(os.path.expanduser(location))
    named = path if os.path.isfile(path) else getattr(sys.modules.get(location), "__file__", None)
    if not location or named is None:
        return {}
    is_defined = inspect.isfunction(function) or inspect.isclass(function)
    module = sys.modules.get(function.__module__) if is_defined else None
    defining = getattr(module, "__file__", None) or named
    if os.path.realpath(defining) == os.path.realpath(named):
        return {location: named}
    return {location: named, f"{location}: {os.path.basename(defining)}": defining}


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The named parameters of a function, and whether it also takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}, takes_any


def is_builtin(function: Callable[..., Any]) -> bool:
    """True for a reward of this package. Its keyword-only parameters are settings, which only ``args`` fills."""
    return str(getattr(function, "__module__", None)).startswith("grpo.rewards.")


def _settings(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a built-in reward; none of any other function."""
    parameters = _parameters(function)[0] if is_builtin(function) else {}
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def passed_names(function: Callable[..., Any], available: Collection[str], arguments: Collection[str]) -> list[str]:
    """The names among ``available`` (columns, and what the trainer gives) that a reward with these ``args`` gets."""
    parameters, takes_any = _parameters(function)
    by_configuration = {*arguments, *_settings(function)}
    accepted = [n for n in available if n in parameters or (takes_any and n not in ONLY_IF_NAMED)]
    return [name for name in accepted if name not in by_configuration]


def check_arguments(spec: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the ``args`` of a configuration suit the function.

    A built-in accepts its settings alone, although it takes ``**columns``, and each with a value of its type: that of
    the default, or the annotated one.
    """
    parameters, takes_any = _parameters(function)
    settings = _settings(function)
    own = list(settings or (name for name in parameters if name not in TRAINER_ARGUMENTS))
    for name in arguments:
        if name not in own and (settings or not takes_any or name in TRAINER_ARGUMENTS):
            raise ValueError(f"reward {spec!r} has no argument {name!r} for its args; it has {', '.join(own)}")
    for name, value in arguments.items() if settings else ():
        default = settings[name].default
        kind = settings[name].annotation if default in (None, inspect.Parameter.empty) else type(default)
        is_number = type(value) in (int, float) and math.isfinite(value)
        if kind in (float, int, bool, str) and not (is_number if kind is float else type(value) is kind):
            raise ValueError(f"reward {spec!r}: {name} must be of type {kind.__name__}, got {value!r}")
        if name == "tag" and value is not None and not re.fullmatch(r"[^][<>/ ]+", str(value)):
            raise ValueError(f"reward {spec!r}: tag must be a bare name such as 'answer' (no <>), got {value!r}")


def _needed_columns(function: Callable[..., Any], arguments: Mapping[str, Any]) -> frozenset[str]:
    """The columns that a reward cannot run without: for a built-in the values of its ``column`` and ``*_column``
    settings, for any other function its parameters without a default."""
    if is_builtin(function):
        settings = {name: p.default for name, p in _settings(function).items()} | dict(arguments)
        return frozenset(str(value) for name, value in settings.items() if ("_" + name).endswith("_column"))
    parameters, _ = _parameters(function)
    required = {name for name, p in parameters.items() if p.default is p.empty}
    return frozenset(required - set(TRAINER_ARGUMENTS) - set(arguments))


def check_columns(
    reward: str,
    needed: Collection[str],
    available: Collection[str],
    source: str,
) -> None:
    """Check that the rows, which come from ``source``, have every column that a reward needs."""
    missing = sorted(set(needed) - set(available))
    if missing:
        existing = ", ".join(sorted(available))
        raise ValueError(f"reward {reward!r} needs the column(s) {', '.join(missing)}; {source} have {existing}")

"""Find reward functions by the names that configurations use, and tell what a function takes.

A name is built-in, ``package.module:function``, ``path/to/file.py:function`` or ``classifier:<model>``.
"""

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_IN_BUILTIN = (
    "accuracy", "format", "tag_groups", "pattern_answer", "exact_or_stripped", "soft_overlong", "countdown",
    "math_verify", "r1_zero", "reasoning_gym",
)  # fmt: skip
BUILTIN: dict[str, str] = dict.fromkeys(_IN_BUILTIN, "grpo.rewards.builtin") | {
    "python_tests": "grpo.rewards.code",
}
"""Name -> the module that defines a function of that name. The module is imported when the reward is loaded."""

CLASSIFIER_PREFIX = "classifier:"
OBJECT_PREFIX = "python:"
"""Begins the name of a reward that a program gave to ``grpo.train`` as an object, whose code others cannot import."""
ONLY_IF_NAMED = ("trainer_state", "log_metric", "log_extra")
"""Arguments that a reward gets only if it has a parameter of that name: rewards expect columns in ``**kwargs``."""
TRAINER_ARGUMENTS = ("prompts", "completions", "completion_ids", *ONLY_IF_NAMED)
"""The arguments that the trainer passes to a reward besides the columns. A column of such a name is not passed."""
MAKE_IT_IN_THE_FILE = "in its file write reward = Name(...), and name that"
FILE_MODULE_PREFIX = "grpo_reward_file_"
"""Begins the name in ``sys.modules`` of a file named by ``path/to/file.py:function``."""


def load_reward(spec: str) -> Callable[..., Any]:
    """Load ``fn(prompts, completions, **columns) -> list[float | None]``.

    Raises:
        ValueError: if the function does not exist or its file cannot be imported. The one-line message lists the names
            that exist, or has the file and line that failed.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"a reward is named by a string, got {spec!r}")
    spec = spec.strip()
    if spec.startswith(CLASSIFIER_PREFIX):
        from grpo.rewards.classifier import ClassifierReward  # imports torch, which reward workers do not need

        return ClassifierReward(spec[len(CLASSIFIER_PREFIX) :])
    if spec in BUILTIN:
        return getattr(importlib.import_module(BUILTIN[spec]), spec)
    location, separator, function = spec.rpartition(":")
    if spec.startswith(OBJECT_PREFIX):
        raise ValueError(
            f"reward {spec!r} was given to grpo.train() as a Python object, which a configuration cannot hold: write "
            f"the function to a file and name path/to/file.py:{function}, or name another reward"
        )
    if not separator:
        raise ValueError(
            f"unknown reward {spec!r}{_did_you_mean(spec, BUILTIN)}; built in are {', '.join(BUILTIN)}; "
            'your own is "package.module:function" or "path/to/file.py:function"'
        )
    if not location or not function:
        raise ValueError(f"reward {spec!r} must read package.module:function or path/to/file.py:function")
    is_file = location.endswith(".py") or os.sep in location
    module = _import_file(spec, location) if is_file else _import_module(spec, location)
    return _get_function(spec, module, location, function)


def _did_you_mean(name: str, known: Collection[str]) -> str:
    similar = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


def _import_file(spec: str, path: str) -> ModuleType:
    path = os.path.realpath(os.path.expanduser(path))
    if not os.path.isfile(path):
        raise ValueError(f"reward {spec!r}: there is no file {path}")
    # The module name contains the file's path and version: two functions of one file share its globals, and an edited
    # file is imported again.
    status = os.stat(path)
    key = hashlib.blake2b(f"{path}\0{status.st_mtime_ns}\0{status.st_size}".encode(), digest_size=8).hexdigest()
    name = f"{FILE_MODULE_PREFIX}{key}"
    if name in sys.modules:
        return sys.modules[name]
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))  # a reward file can import modules of its own folder, as a script can
    loader = importlib.machinery.SourceFileLoader(name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
    sys.modules[name] = module  # before the module runs: pickle and dataclasses look a module up by name
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"reward {spec!r}: {_import_error_message(error, path)}") from error
    return module


def _import_module(spec: str, name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # torchrun puts the script's folder on the path, not the working folder
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and (name + ".").startswith(error.name + "."):
            raise ValueError(f"reward {spec!r}: there is no module {error.name!r} on the Python path") from None
        raise ValueError(f"reward {spec!r}: {_import_error_message(error, None)}") from error


def _import_error_message(error: BaseException, path: str | None) -> str:
    """``file:line: message`` for an error of an import. The line is the innermost one of the user's file ``path``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    own = [f for f in frames if f.filename == path] or frames[-1:]
    location = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return " ".join(f"{location}importing it raised {type(error).__name__}: {error}".split())


def _get_function(spec: str, module: ModuleType, location: str, function: str) -> Callable[..., Any]:
    if not hasattr(module, function):
        functions = {name: value for name, value in sorted(vars(module).items()) if inspect.isfunction(value)}
        own = [n for n, f in functions.items() if f.__module__ == module.__name__ and not n.startswith("_")]
        raise ValueError(
            f"reward {spec!r}: {location} has no function {function!r}{_did_you_mean(function, own)}; "
            f"it has {', '.join(own) or 'none'}"
        )
    value = getattr(module, function)
    if not callable(value):
        raise ValueError(f"reward {spec!r}: {function!r} is not callable but a {type(value).__name__}")
    if inspect.isclass(value):
        raise ValueError(f"reward {spec!r}: that is a class: give an instance ({MAKE_IT_IN_THE_FILE})")
    return value


def display_name(spec: str) -> str:
    """The name of a reward in metrics: ``fn`` of ``path/to/file.py:fn``, the last part of a classifier's path."""
    return spec.strip().rstrip("/").rpartition(":")[2].rpartition("/")[2]


def unique_names(specs: Collection[str]) -> list[str]:
    """The display names of rewards; the second of the same name gets ``_2``, and so on."""
    names: list[str] = []
    for base in map(display_name, specs):
        candidates = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(2)))
        names.append(next(name for name in candidates if name not in names))
    return names


@dataclass(frozen=True)
class FunctionInfo:
    """Properties of a loaded reward, for the training process, which does not import the function."""

    is_async: bool
    row_by_row: bool
    """True if the function asks, by ``fn.row_by_row = True``, to be called with one row at a time."""
    needed_columns: frozenset[str]
    source_files: dict[str, str]
    """Name for messages -> path of the file that the reward's name points to, and of the file that defines the function
    if that is another. Empty for built-in rewards, which belong to the version of this package."""


def describe(spec: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> FunctionInfo:
    """The properties of a function with the ``args`` of its configuration."""
    call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    row_by_row = bool(getattr(function, "row_by_row", False))
    return FunctionInfo(is_async, row_by_row, _needed_columns(function, arguments), _source_files(spec, function))


def _source_files(spec: str, function: Callable[..., Any]) -> dict[str, str]:
    location = spec.strip().rpartition(":")[0]
    path = os.path.realpath(os.path.expanduser(location))
    named = path if os.path.isfile(path) else getattr(sys.modules.get(location), "__file__", None)
    if not location or named is None:
        return {}
    module = sys.modules.get(function.__module__) if inspect.isfunction(function) else None
    defining = getattr(module, "__file__", None) or named
    if os.path.realpath(defining) == os.path.realpath(named):
        return {location: named}
    return {location: named, f"{location}: {os.path.basename(defining)}": defining}


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The named parameters of a function, and whether it also takes ``**kwargs``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some C functions have no signature: pass them everything
        return {}, True
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

    An argument must not be one that the trainer passes. A built-in accepts its settings and nothing else, although it
    takes ``**columns``, and all that have no default must be given. It cannot read a column that has the name of one
    of its parameters.
    """
    parameters, takes_any = _parameters(function)
    builtin, settings = is_builtin(function), _settings(function)
    own = list(settings) if builtin else [name for name in parameters if name not in TRAINER_ARGUMENTS]
    for name in arguments:
        if name in TRAINER_ARGUMENTS:
            raise ValueError(f"reward {spec!r}: {name!r} is given by the trainer, not by args")
        if name not in own and (builtin or not takes_any):
            raise ValueError(
                f"reward {spec!r} has no argument {name!r}{_did_you_mean(name, own)}; it has {', '.join(own) or 'none'}"
            )
    missing = [name for name, p in settings.items() if p.default is p.empty and name not in arguments]
    if missing:
        raise ValueError(f"reward {spec!r} needs the argument(s) {', '.join(missing)} in its args")
    needed = _needed_columns(function, arguments)
    if not (builtin or takes_any or needed or set(parameters) & set(TRAINER_ARGUMENTS)):
        raise ValueError(
            f"reward {spec!r} takes neither prompts nor completions nor a column: if it makes the reward, "
            f"{MAKE_IT_IN_THE_FILE}"
        )
    for column in needed if builtin else ():
        if column in (*parameters, *TRAINER_ARGUMENTS):
            raise ValueError(
                f"reward {spec!r} cannot read a column named {column!r}, which is the name of an argument: rename the "
                f"column, or name it in data.answer_column (rewards get it as 'answer' then)"
            )


def _needed_columns(function: Callable[..., Any], arguments: Mapping[str, Any]) -> frozenset[str]:
    """The columns that a reward cannot run without: for a built-in the values of its ``column`` and ``*_column``
    settings, for any other function its parameters without a default."""
    if is_builtin(function):
        settings = {name: p.default for name, p in _settings(function).items()} | dict(arguments)
        return frozenset(str(value) for name, value in settings.items() if ("_" + name).endswith("_column"))
    parameters, _ = _parameters(function)
    required = {name for name, p in parameters.items() if p.default is p.empty}
    return frozenset(required - set(TRAINER_ARGUMENTS) - set(arguments))


def check_columns(reward: str, needed: Collection[str], available: Collection[str]) -> None:
    """Check that the rows have every column that a reward needs."""
    missing = sorted(set(needed) - set(available))
    if missing:
        existing = ", ".join(sorted(available)) or "none"
        raise ValueError(f"reward {reward!r} needs the column(s) {', '.join(missing)}; the rows have {existing}")

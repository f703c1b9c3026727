"""From the name in a configuration to a function: built-in, ``package.module:function``, ``path/to/file.py:function``."""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

BUILTIN: dict[str, str] = {
    "accuracy": "grpo.rewards.builtin",
    "format": "grpo.rewards.builtin",
    "tag_groups": "grpo.rewards.builtin",
    "exact_or_stripped": "grpo.rewards.builtin",
    "soft_overlong": "grpo.rewards.builtin",
    "countdown": "grpo.rewards.builtin",
    "math_verify": "grpo.rewards.symbolic",
    "r1_zero": "grpo.rewards.symbolic",
    "python_tests": "grpo.rewards.python_tests",
    "reasoning_gym": "grpo.rewards.gym",
}
"""Name -> module that holds a function of that name; imported when asked for."""

CLASSIFIER = "classifier:"
OFFERED = ("prompts", "completions", "completion_ids")
"""What every reward may take besides the columns of its rows."""


def load_reward(spec: str) -> Callable[..., Any]:
    """The reward function that ``spec`` names.

    Args:
        spec: a built-in name, ``"package.module:function"``, ``"path/to/file.py:function"`` or ``"classifier:<model>"``.

    Returns:
        ``fn(prompts, completions, **columns) -> list[float | None]``.

    Raises:
        ValueError: in one line, if there is no such thing: what exists instead, or the file and line that failed.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"a reward is named by a string, got {spec!r}")
    spec = spec.strip()
    if spec.startswith(CLASSIFIER):
        from grpo.rewards.classifier import ClassifierReward  # here, because building one imports torch

        return ClassifierReward(spec[len(CLASSIFIER) :])
    if spec in BUILTIN:
        return getattr(importlib.import_module(BUILTIN[spec]), spec)
    location, separator, function = spec.rpartition(":")
    if not separator:
        near = difflib.get_close_matches(spec, BUILTIN, n=1)
        raise ValueError(
            f"unknown reward {spec!r}{f' (did you mean {near[0]!r}?)' if near else ''}; built in are {', '.join(BUILTIN)}; "
            'your own is "package.module:function" or "path/to/file.py:function"'
        )
    if not location or not function:
        raise ValueError(f"reward {spec!r} must read package.module:function or path/to/file.py:function")
    is_file = location.endswith(".py") or os.sep in location
    module = _import_file(spec, location) if is_file else _import_module(spec, location)
    return _function_of(spec, module, location, function)


def display_name(spec: str) -> str:
    """The name of a reward in metrics: ``fn`` for ``path/to/file.py:fn``, the last part of a classifier's path."""
    return spec.strip().rstrip("/").rpartition(":")[2].rpartition("/")[2]


def _import_file(spec: str, path: str) -> ModuleType:
    path = os.path.realpath(os.path.expanduser(path))
    if not os.path.isfile(path):
        raise ValueError(f"reward {spec!r}: there is no file {path}")
    # One module per file and version of it, so that two functions of a file share its globals, and an edit is seen.
    status = os.stat(path)
    key = hashlib.blake2b(f"{path}\0{status.st_mtime_ns}\0{status.st_size}".encode(), digest_size=8).hexdigest()
    name = f"grpo_reward_file_{key}"
    if name in sys.modules:
        return sys.modules[name]
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))  # a reward file may import its neighbours, as a script does
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"reward {spec!r}: {path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before it runs: pickle and dataclasses look a module up by name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"reward {spec!r}: {_where(error, path)}") from error
    return module


def _import_module(spec: str, name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # under torchrun the script's folder is on the path, the working folder is not
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and (name + ".").startswith(error.name + "."):
            raise ValueError(f"reward {spec!r}: there is no module {error.name!r} on the Python path") from None
        raise ValueError(f"reward {spec!r}: {_where(error, None)}") from error


def _where(error: BaseException, path: str | None) -> str:
    """``file:line: what`` for an error met while importing; the innermost line of the user's own file if it has one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    own = [f for f in frames if f.filename == path] or frames[-1:]
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return " ".join(f"{place}importing it raised {type(error).__name__}: {error}".split())


def _function_of(spec: str, module: ModuleType, location: str, function: str) -> Callable[..., Any]:
    if not hasattr(module, function):
        own = [
            name
            for name, value in sorted(vars(module).items())
            if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
        near = difflib.get_close_matches(function, own, n=1)
        raise ValueError(
            f"reward {spec!r}: {location} has no function {function!r}"
            f"{f' (did you mean {near[0]!r}?)' if near else ''}; it has {', '.join(own) or 'none'}"
        )
    value = getattr(module, function)
    if not callable(value):
        raise ValueError(f"reward {spec!r}: {function!r} is not callable but a {type(value).__name__}")
    return value


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine (a function, or an object with an async ``__call__``)."""
    call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Parameters by name, and whether the function takes any others (``**kwargs``)."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some C functions have no signature: give them everything
        return {}, True
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}, takes_any


def accepted_columns(function: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The keywords a reward accepts (``None``: any) and those it cannot do without."""
    parameters, takes_any = _parameters(function)
    required = frozenset(name for name, p in parameters.items() if p.default is p.empty)
    return (None if takes_any else frozenset(parameters)), required


def check_arguments(spec: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Compare the ``args`` of a configuration with the function's parameters.

    Raises:
        ValueError: for an argument it does not have (a built-in swallows none by its ``**columns``), one that is not the
            configuration's to give, or, for a built-in, one that is missing.
    """
    parameters, takes_any = _parameters(function)
    builtin = spec.strip() in BUILTIN
    own = [n for n, p in parameters.items() if (p.kind is p.KEYWORD_ONLY if builtin else n not in OFFERED)]
    for name in arguments:
        if name in OFFERED:
            raise ValueError(f"reward {spec!r}: {name!r} is given by the trainer, not by args")
        if name not in own and (builtin or not takes_any):
            near = difflib.get_close_matches(name, own, n=1)
            raise ValueError(
                f"reward {spec!r} has no argument {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}; "
                f"it has {', '.join(own) or 'none'}"
            )
    missing = [n for n in own if builtin and parameters[n].default is inspect.Parameter.empty and n not in arguments]
    if missing:
        raise ValueError(f"reward {spec!r} needs the argument(s) {', '.join(missing)} in its args")


def needed_columns(spec: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> frozenset[str]:
    """The columns without which a reward cannot run: its parameters without default, or a built-in's ``*column`` arguments."""
    parameters, _ = _parameters(function)
    if spec.strip() in BUILTIN:
        names = [n for n in parameters if n == "column" or n.endswith("_column")]
        return frozenset(str(arguments.get(n, parameters[n].default)) for n in names)
    _, required = accepted_columns(function)
    return required - set(OFFERED) - set(arguments)


def missing_columns(name: str, needed: Collection[str], available: Collection[str]) -> str | None:
    """One line saying which columns a reward lacks, or ``None``."""
    missing = sorted(set(needed) - set(available))
    if not missing:
        return None
    return f"reward {name!r} needs the column(s) {', '.join(missing)}; the rows have {', '.join(sorted(available)) or 'none'}"

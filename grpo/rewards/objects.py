"""Reward functions given as Python objects: their names, their digests, and how a worker process gets them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from grpo.rewards.registry import BUILTIN, FILE_MODULE_PREFIX
from grpo.system import first_line

PLAIN = (type(None), bool, int, float, complex, str, bytes)


def display_name(function: Any) -> str:
    """The function's own name, that of an object's class, or ``lambda``: ``reward`` is the name of the total."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name


def importable_name(function: Any) -> str | None:
    """The name by which a worker can import a function, as a configuration would write it; None if it has none.

    A function of a script or a notebook (``__main__``) has none: to import it, the worker would run the script again.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    loaded = sys.modules.get(module) if isinstance(module, str) and isinstance(name, str) else None
    if module == "__main__" or getattr(loaded, "__spec__", None) is None or vars(loaded).get(name) is not function:
        return None
    if BUILTIN.get(name) == module:
        return name
    return f"{loaded.__file__ if module.startswith(FILE_MODULE_PREFIX) else module}:{name}"


def pickled(function: Callable[..., Any] | None) -> bytes | str | None:
    """The function by value: its code, and what its code refers to (modules by name); or the reason why that is impossible."""
    if function is None:
        return None
    try:
        return importlib.import_module("dill").dumps(function, recurse=True)
    except Exception as error:  # of any type: each object may raise its own
        return f"{type(error).__name__}: {first_line(error)}"


def digest(function: Any) -> str:
    """SHA-256 of a function's code, the constants that it uses, and the functions of the same module that it calls.

    Comments and line numbers do not count, so that it stays the same where a cell of a notebook is only executed again. It depends on
    the version of Python.
    """
    facts = "\n".join(_facts(function, set()))
    return hashlib.sha256(facts.encode()).hexdigest()


def _facts(value: Any, seen: set[int]) -> Iterator[str]:
    """The lines of text that :func:`digest` hashes for a value; none for an object whose id is in ``seen``, which has been counted."""
    if isinstance(value, PLAIN):
        yield repr(value)
    elif isinstance(value, (tuple, frozenset)):
        parts = ["\n".join(_facts(item, seen)) for item in value]
        yield from parts if isinstance(value, tuple) else sorted(parts)  # the order of a set differs between processes
    elif id(value) in seen:
        return
    elif isinstance(value, types.CodeType):
        yield f"{value.co_code.hex()} {value.co_names} {value.co_varnames} {value.co_freevars}"
        yield from _facts(value.co_consts, seen)
    elif isinstance(value, types.FunctionType):
        seen.add(id(value))
        yield from _facts(value.__code__, seen)
        yield from _facts(value.__defaults__ or (), seen)
        yield from _of_names(value.__kwdefaults__ or {}, seen)
        free = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from _of_names({name: _content(cell) for name, cell in free}, seen)
        used = [name for name in _names_in(value.__code__) if name in value.__globals__]
        yield from _of_names({name: value.__globals__[name] for name in used}, seen, module=value.__module__)
    elif isinstance(value, types.MethodType):
        yield from _facts((value.__func__, value.__self__), seen)
    elif isinstance(value, functools.partial):
        yield from _facts((value.func, value.args), seen)
        yield from _of_names(value.keywords, seen)
    elif isinstance(value, type):
        seen.add(id(value))
        functions = {name: item for name, item in vars(value).items() if isinstance(item, (*PLAIN, types.FunctionType))}
        yield from _of_names({n: f for n, f in functions.items() if n not in ("__module__", "__firstlineno__")}, seen)
    elif callable(value) and not isinstance(value, types.BuiltinFunctionType):
        seen.add(id(value))
        yield from _facts(type(value), seen)
        yield from _of_names(getattr(value, "__dict__", {}), seen)
    else:  # a list may be filled while the reward runs, and other objects may have an address in their repr
        yield type(value).__qualname__


def _of_names(values: dict[str, Any], seen: set[int], module: str | None = None) -> Iterator[str]:
    """The facts of each value. With ``module`` only of constants, and of functions and classes of that module: the others are libraries."""
    for name, value in sorted(values.items()):
        if module is None or isinstance(value, (*PLAIN, tuple)) or getattr(value, "__module__", None) == module:
            yield name
            yield from _facts(value, seen)


def _names_in(code: types.CodeType) -> set[str]:
    """The names that the code, and functions inside it, look up."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None

"""Read the tests of a row in the forms in which datasets publish them, and refuse every other form."""

import ast
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo.rewards.result import RewardSpec

FORMS = "a row has a list of tests; each is a statement such as 'assert f(2) == 4', or {'input': ..., 'output': ...}; docs/rewards.md has other forms"
_PROGRAM_TYPES = ("stdin", "stdin_stdout")
_FUNCTION_TYPES = ("functional", "function_call")

CALL_PROGRAM = """
import io, json, sys, types
arguments, output = json.load(sys.stdin), sys.stdout
sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
solution = sys.modules["solution"] = types.ModuleType("solution")
exec("from typing import *", solution.__dict__)
try:
    exec(compile({code!r}, "solution.py", "exec"), solution.__dict__)
except SystemExit:
    pass
owner = solution.Solution() if hasattr(getattr(solution, "Solution", None), {function!r}) else solution
print(json.dumps(getattr(owner, {function!r})(*arguments)), file=output, flush=True)
"""
"""A program that calls a function of ``code``, or of its class ``Solution``. The arguments are JSON on stdin, the result is JSON on stdout:
the expected result is compared outside the sandbox."""


def check_rows(specs: Iterable[RewardSpec], rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Raise ``ValueError``, with the row, if the tests of a row cannot be read by a ``python_tests`` among the rewards."""
    for column in {spec.args.get("column", "tests") for spec in specs if spec.name == "python_tests"}:
        for number, row in enumerate(rows, 1):
            try:
                read_tests(row.get(column), row.get("entry_point"))
            except ValueError as error:
                raise ValueError(f"{source}, row {number}, column {column}: {error}") from None


def read_tests(given: Any, entry_point: str | None = None) -> list[dict[str, str]]:
    """The tests of a row; ``ValueError`` for a form that is not listed here.

    ``given`` is a list of tests, a single test, or JSON of these:

    * a statement that can fail: ``"assert f(2) == 4"`` (MBPP), or a definition of ``check`` that is called with ``entry_point`` (HumanEval);
    * ``{"input": text, "output": text}`` for a program; a list of lines is joined. With ``"fn_name"``, or ``"metadata":
      {"func_name": ...}``, the function is called instead: ``input`` is the list of its arguments (TACO), or a text with one JSON value
      per line (LiveCodeBench). ``"type"`` or ``"testtype"`` may say which it is;
    * ``{"inputs": [...], "outputs": [...]}``, also with ``"fn_name"`` (APPS, TACO), ``{"input": [...], "output": [...]}`` (CodeContests)
      or ``{"test_cases": [...]}`` instead of the list.

    Each test is returned as ``{"code": ...}``, as ``{"input": ..., "output": ...}`` for a program, or as ``{"function": ..., "input":
    ..., "output": ...}`` with JSON of the arguments and of the list of right results.
    """
    if isinstance(given, str):
        try:
            parsed = json.loads(given)
        except (ValueError, RecursionError):
            parsed = [given]
        if isinstance(parsed, str | int | float):
            raise _mistake(given, "is no test that can be read")
        given = parsed
    if isinstance(given, Mapping):
        given = _list_of(given)
    if not isinstance(given, Sequence | None):
        raise _mistake(given, "is no test that can be read")
    tests = [_read_test(test, entry_point) for test in given or [] if not (isinstance(test, str) and not test.strip())]
    if len({test.get("function") for test in tests}) > 1:
        raise _mistake(given, "mixes tests: all of a row must call the same function, or none a function")
    return tests


def _mistake(given: Any, reason: str) -> ValueError:
    text = repr(given)
    return ValueError(f"{text if len(text) <= 100 else text[:97] + '...'} {reason}; {FORMS}")


def _list_of(given: Mapping[str, Any]) -> Any:
    if given.get("test_cases") is not None:
        return given["test_cases"]
    inputs, outputs, name = given.get("inputs"), given.get("outputs"), given.get("fn_name")
    if inputs is None and outputs is None:
        inputs, outputs = given.get("input"), given.get("output")
        if name or not isinstance(inputs, list) or not isinstance(outputs, list):
            return [given]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise _mistake(given, "does not have as many inputs as outputs")
    return [{"input": i, "output": o, "fn_name": name} for i, o in zip(inputs, outputs, strict=True)]


def _read_test(test: Any, entry_point: str | None) -> dict[str, str]:
    if isinstance(test, str):
        return {"code": _statement(test, entry_point)}
    if not isinstance(test, Mapping) or test.get("input") is None or test.get("output") is None:
        raise _mistake(test, "is no test that can be read")
    metadata = test.get("metadata")
    name = test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    kind = test.get("type") or test.get("testtype") or (_FUNCTION_TYPES if name else _PROGRAM_TYPES)[0]
    if kind in _PROGRAM_TYPES:
        return {key: _text(test[key], test) for key in ("input", "output")}
    if kind not in _FUNCTION_TYPES or not isinstance(name, str):
        raise _mistake(test, f"is of type {kind!r} and names no function (fn_name)")
    arguments, result = test["input"], test["output"]
    right = [result, *(result if isinstance(result, list) and len(result) == 1 else [])]  # APPS wraps results in a list
    if isinstance(arguments, str):
        try:
            arguments, right = (
                [json.loads(line) for line in arguments.splitlines() if line.strip()],
                [json.loads(result)],
            )
        except (TypeError, ValueError):
            raise _mistake(test, "has arguments or a result that are not JSON") from None
    if not isinstance(arguments, list):
        raise _mistake(test, "has no list of arguments")
    return {"function": name, "input": json.dumps(arguments), "output": json.dumps(right)}


def _text(value: Any, test: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise _mistake(test, "has an input or output that is not text")
    return "\n".join(map(str, lines))


def _statement(code: str, entry_point: str | None) -> str:
    """``code``, with the call that HumanEval leaves to its reader."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _mistake(code, f"is not Python: {error}") from None
    if _can_fail(tree):
        return code
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in defined and isinstance(entry_point, str) and entry_point.isidentifier():
        return f"{code}\ncheck({entry_point})"
    raise _mistake(code, "cannot fail: it has no assert, raise or call that is executed")


def _can_fail(node: ast.AST) -> bool:
    """True if executing ``node`` may reach an ``assert``, a ``raise``, or a call whose result is not used. Definitions are not executed."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant | ast.Tuple)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    return isinstance(node, ast.Raise) or any(map(_can_fail, ast.iter_child_nodes(node)))

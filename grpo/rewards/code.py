"""The reward ``python_tests``: the fraction of a row's tests that the completion's code passes in the sandbox."""

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo.rewards.answers import completion_text, tag_content
from grpo.rewards.builtin import Rewards, column_values, require_number, require_tag
from grpo.rewards.sandbox import Limits, SandboxResult, run_python

MAX_CODE_LENGTH = 100_000
FORMS = (
    "a row has a list of tests; each is a statement such as 'assert f(2) == 4', or {'input': ..., 'output': ...}; "
    "docs/rewards.md has other forms"
)
_BLOCK = re.compile(
    r"""(?: (?P<ticks>`{3,}+)
        # A line of tildes without a word is a fence only if a later line closes it.
        | ^[ \t]*(?P<tildes>~{3,}+) (?= \w+[ \t]*$ | [ \t]*$.*?^[ \t]*(?P=tildes)~*[ \t]*$) )
    # The rest of the line: empty, or the language with a version or attributes.
    (?: [ \t{.]* (?i:i?python|py) (?![^\W\d]) [^\n`]* \n | [ \t\r]*\n )?
    (?P<code>.*?)
    (?: (?(ticks)(?P=ticks)`*|^[ \t]*(?P=tildes)~*\w*[ \t]*$) | \Z)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
"""A fenced block. One without a closing fence, from a truncated response, counts too."""
_FENCE_OR_TAG = re.compile(r"```|(^[ \t]*)?(</?think>)", re.MULTILINE)
_CALL_PROGRAM = """
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
"""A program that calls a function of ``code``, or of its class ``Solution``. The arguments are JSON on stdin, the
result is JSON on stdout: the expected result is compared outside the sandbox."""


def python_tests(
    prompts, completions, *, value=1.0, tag=None, column="tests", test_seconds=Limits.test_seconds,
    total_seconds=Limits.total_seconds, memory_mb=Limits.memory_mb, processes=Limits.processes,
    output_kb=Limits.output_kb, allow_unsandboxed=False, **columns,
) -> Rewards:  # fmt: skip
    """``value`` times the fraction of tests passed; 0 without code, ``None`` without tests.

    :func:`extract_code` finds the code, :func:`read_tests` reads the tests. Outputs are compared outside the sandbox,
    those of a program up to white space at the ends of lines. ``total_seconds`` (all tests of one completion) must be
    less than ``reward.timeout_s``: code that hangs then scores 0, not ``None``.
    """
    require_number(value=value)
    if tag is not None:
        require_tag(tag)
    limits = Limits(test_seconds, total_seconds, memory_mb=memory_mb, processes=processes, output_kb=output_kb)
    if not completions:  # this call checks a configuration: fail now on a machine that cannot provide the sandbox
        run_python("", [{"code": ""}], limits, allow_unsandboxed=allow_unsandboxed)
    rewards: Rewards = []
    tests_of_rows = column_values(columns, column, completions, "python_tests")
    entry_points = columns.get("entry_point") or [None] * len(completions)
    for completion, given, entry_point in zip(completions, tests_of_rows, entry_points, strict=True):
        tests = read_tests(given, entry_point)
        code = extract_code(completion_text(completion), tag)
        if not tests or code is None:
            rewards.append(0.0 if tests else None)
            continue
        # The code must not see the expected outputs.
        visible_tests = [{k: v for k, v in test.items() if k in ("code", "input")} for test in tests]
        if "function" in tests[0]:
            code = _CALL_PROGRAM.format(code=code, function=tests[0]["function"])
        results = run_python(code, visible_tests, limits, allow_unsandboxed=allow_unsandboxed)
        rewards.append(value * sum(map(_passed, tests, results)) / len(tests))
    return rewards


python_tests.row_by_row = True


def _passed(test: dict[str, str], result: SandboxResult) -> bool:
    if result.status != "passed" or "code" in test:
        return result.status == "passed"
    if "function" not in test:
        return _lines(result.output) == _lines(test["output"])
    try:
        return json.loads(result.output) in json.loads(test["output"])
    except (ValueError, RecursionError):  # the code wrote something else
        return False


def _lines(text: str) -> list[str]:
    # Not splitlines() and rstrip() alone: for them a form feed and U+2028 are ends of lines and white space.
    return [line.rstrip(" \t\r") for line in text.rstrip(" \t\r\n").split("\n")]


def extract_code(text: str, tag: str | None = None) -> str | None:
    """The last fenced block after the thinking, or all text after it; ``None`` if that is empty or too long.

    With ``tag``, only the text inside the only ``<tag>...</tag>`` is read (``None`` without that tag).
    """
    text = _after_thinking(text) if tag is None else tag_content(text, tag) or ""
    blocks = list(_BLOCK.finditer(text))
    code = blocks[-1]["code"] if blocks else text
    return textwrap.dedent(code) if code.strip() and len(code) <= MAX_CODE_LENGTH else None


def _after_thinking(text: str) -> str:
    """As ``answers.after_thinking``, but a tag in a block fenced by backticks counts only at the start of a line."""
    start, end, inside = 0, len(text), False
    for found in _FENCE_OR_TAG.finditer(text):
        at_line_start, tag = found.groups()
        if tag is None:
            inside = not inside
        elif not inside or at_line_start is not None:
            if tag == "</think>":
                start, end, inside = found.end(), len(text), False
            else:
                end = min(end, found.start(2))
    return text[start:end]


def check_rows(specs: Iterable[Any], rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Raise ``ValueError``, with the row, if a ``python_tests`` among the rewards cannot read the tests of a row."""
    for column in {spec.args.get("column", "tests") for spec in specs if spec.name == "python_tests"}:
        for number, row in enumerate(rows, 1):
            try:
                read_tests(row.get(column), row.get("entry_point"))
            except ValueError as error:
                raise ValueError(f"{source}, row {number}, column {column}: {error}") from None


def read_tests(given: Any, entry_point: str | None = None) -> list[dict[str, str]]:
    """The tests of a row in the forms in which datasets publish them; ``ValueError`` for any other form.

    Each test is returned as ``{"code": ...}``, as ``{"input": ..., "output": ...}`` for a program, or as ``{"function":
    ..., "input": ..., "output": ...}`` with JSON of the arguments and of the list of right results. ``docs/rewards.md``
    lists the forms; ``entry_point`` is the function that a HumanEval test calls.
    """
    tests = []
    for test in _list_of(given):
        try:
            if not isinstance(test, str) or test.strip():
                tests.append(_read_test(test, entry_point))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise _mistake(test, f"is no test that can be read: {error}") from None
    if len({test.get("function") for test in tests}) > 1:
        raise _mistake(given, "mixes tests: all of a row must call the same function, or none a function")
    return tests


def _mistake(given: Any, reason: str) -> ValueError:
    return ValueError(f"{given!r:.100} {reason}; {FORMS}")


def _list_of(given: Any) -> Sequence[Any]:
    """The tests of a row, each still in the form in which it was published."""
    tests = given
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError):
            tests = [given]
    if isinstance(tests, Mapping):
        fields = {key: value for key, value in tests.items() if value is not None}  # a column of structs has every key
        s = "s" if "inputs" in fields or "outputs" in fields else ""
        inputs, outputs, name = fields.get("input" + s), fields.get("output" + s), fields.get("fn_name")
        lists = isinstance(inputs, list) and isinstance(outputs, list)
        if "test_cases" in fields:
            tests = fields["test_cases"]
        elif not s and (name or not lists):
            tests = [fields]
        elif lists and len(inputs) == len(outputs):
            tests = [{"input": i, "output": o, "fn_name": name} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list | tuple | None):
        raise _mistake(given, "is no test that can be read")
    return tests or []


def _read_test(test: Any, entry_point: str | None) -> dict[str, str]:
    if isinstance(test, str):
        return {"code": _statement(test, entry_point)}
    if not isinstance(test, Mapping) or test.get("input") is None or test.get("output") is None:
        raise ValueError("it is no statement and has not both an input and an output")
    arguments, result = test["input"], test["output"]
    metadata = test["metadata"] if isinstance(test.get("metadata"), Mapping) else {}
    name = test.get("fn_name") or metadata.get("func_name")
    kind = test.get("type") or test.get("testtype") or ("functional" if name else "stdin")
    if kind in ("stdin", "stdin_stdout"):
        return {"input": _text(arguments), "output": _text(result)}
    if kind not in ("functional", "function_call") or not isinstance(name, str):
        raise ValueError(f"it is of type {kind!r} and names no function (fn_name)")
    right = [result, *(result if isinstance(result, list) and len(result) == 1 else [])]  # APPS wraps results in a list
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        right = [json.loads(result)]
    if not isinstance(arguments, list):
        raise ValueError("it has no list of arguments")
    return {"function": name, "input": json.dumps(arguments), "output": json.dumps(right)}


def _text(value: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError("it has an input or output that is not text")
    return "\n".join(map(str, lines))


def _statement(code: str, entry_point: str | None) -> str:
    """``code``, with the call that HumanEval leaves to its reader."""
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(code)
    if _can_fail(tree):
        return code
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in defined and isinstance(entry_point, str) and entry_point.isidentifier():
        return f"{code}\ncheck({entry_point})"
    raise ValueError("it cannot fail: it has no assert, raise or call that is executed")


def _can_fail(node: ast.AST) -> bool:
    """True if running ``node`` (not what it defines) may reach an ``assert``, a ``raise`` or a call as a statement."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant | ast.Tuple)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    return isinstance(node, ast.Raise) or any(map(_can_fail, ast.iter_child_nodes(node)))

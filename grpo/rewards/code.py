"""The reward ``python_tests``: the fraction of a row's tests that the completion's code passes in the sandbox."""

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo.rewards.answers import after_thinking, completion_text, is_text_of_list, reference_texts, tag_content
from grpo.rewards.builtin import COMPARING, Rewards
from grpo.rewards.sandbox import Limits, SandboxResult, run_python

MAX_CODE_LENGTH = 100_000
FORMS = (
    "a row has a list of tests; each is a statement such as 'assert f(2) == 4', or {'input': ..., 'output': ...}; "
    "docs/rewards.md has other forms"
)
_BLOCK = re.compile(r"(?P<fence>`{3,}+)(?:[^\n`]*\n)?(?P<code>.*?)(?:(?P=fence)|\Z)", re.DOTALL)
"""A fenced block. One without a closing fence, from a truncated response, counts too."""
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
    limits = Limits(test_seconds, total_seconds, memory_mb=memory_mb, processes=processes, output_kb=output_kb)
    if not completions:  # this call checks a configuration: fail now on a machine that cannot provide the sandbox
        run_python("", [{"code": ""}], limits, allow_unsandboxed=allow_unsandboxed)
    rewards: Rewards = []
    tests_of_rows = columns[column] if completions else []
    entry_points = columns.get("entry_point") or [None] * len(completions)
    for completion, raw, entry_point in zip(completions, tests_of_rows, entry_points, strict=True):
        tests = read_tests(raw, entry_point)
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
    text = after_thinking(text) if tag is None else tag_content(text, tag) or ""
    blocks = list(_BLOCK.finditer(text))
    code = blocks[-1]["code"] if blocks else text
    return textwrap.dedent(code) if code.strip() and len(code) <= MAX_CODE_LENGTH else None


def check_rows(
    specs: Iterable[Any],
    rows: Sequence[Mapping[str, Any]],
    source: str,
    places: Sequence[str],
    *,
    has_pattern: bool = False,
) -> None:
    """Raise ``ValueError``, with the row's place, if a reward cannot read the tests or reference answer of a row.

    ``has_pattern``: the answers are what ``data.answer_pattern`` has found, so that each is meant as it is.
    """
    for spec in specs:
        if spec.name == "python_tests":
            column = spec.args.get("column", "tests")
            check = _check_tests
        elif spec.name in COMPARING:
            column = spec.args.get("column", "answer")
            check = _check_reference
            if column == "answer" and has_pattern:
                continue
        else:
            continue
        for place, row in zip(places, rows, strict=True):
            try:
                check(row, column)
            except ValueError as error:
                raise ValueError(f"{source}, {place}, column {column}: {error}") from None


def _check_tests(row: Mapping[str, Any], column: str) -> None:
    try:
        read_tests(row.get(column), row.get("entry_point"))
    except Exception as error:  # of any type: the dataset may hold anything
        mistake = f"{row.get(column)!r:.100} is no test that can be read ({error!r}); {FORMS}"
        raise ValueError(mistake) from None


def _check_reference(row: Mapping[str, Any], column: str) -> None:
    value = row.get(column)
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, value))
        raise ValueError(f"a mapping is no answer: data.answer_column=COLUMN.KEY takes one of its keys, {keys}")
    if is_text_of_list(value):
        raise ValueError(
            f"{value:.60} is the text of a list: data.answer_pattern takes an answer out of it, and "
            "'(?s)(.*)' the whole"
        )
    reference_texts(value)


def read_tests(raw: Any, entry_point: str | None = None) -> list[dict[str, str]]:
    """The tests of a row in the forms in which datasets publish them; an exception for any other form.

    Each test is returned as ``{"code": ...}``, as ``{"input": ..., "output": ...}`` for a program, or as ``{"function":
    ..., "input": ..., "output": ...}`` with JSON of the arguments and of the list of right results. ``docs/rewards.md``
    lists the forms; ``entry_point`` is the function that a HumanEval test calls.
    """
    tests = [_read_test(t, entry_point) for t in _list_of(raw) if not isinstance(t, str) or t.strip()]
    if len({test.get("function") for test in tests}) > 1:
        raise ValueError("all tests of a row must call the same function, or none a function")
    return tests


def _list_of(raw: Any) -> Sequence[Any]:
    """The tests of a row, each still in the form in which it was published."""
    if isinstance(raw, str):
        if not raw.lstrip().startswith(("[", "{")):
            return [raw]  # a statement
        raw = json.loads(raw)
    if isinstance(raw, Mapping):
        fields = {key: value for key, value in raw.items() if value is not None}  # a column of structs has every key
        if "test_cases" in fields:
            return fields["test_cases"]
        inputs, outputs = (fields.get(f"{name}s", fields.get(name)) for name in ("input", "output"))
        is_one = "inputs" not in fields and "fn_name" in fields
        if is_one or not (isinstance(inputs, list) and isinstance(outputs, list)):
            return [fields]
        return [dict(fields, input=i, output=o) for i, o in zip(inputs, outputs, strict=True)]
    return [] if raw is None else raw


def _read_test(test: Any, entry_point: str | None) -> dict[str, str]:
    if isinstance(test, str):
        return {"code": _statement(test, entry_point)}
    arguments, result, metadata = test["input"], test["output"], test.get("metadata")
    name = test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    kind = test.get("type") or test.get("testtype") or ("functional" if name else "stdin")
    if kind in ("stdin", "stdin_stdout"):
        return {"input": _text(arguments), "output": _text(result)}
    right = [result, *(result if isinstance(result, list) and len(result) == 1 else [])]  # APPS wraps results in a list
    if isinstance(arguments, str):
        arguments, right = [json.loads(line) for line in arguments.split("\n") if line.strip()], [json.loads(result)]
    if not name or not isinstance(arguments, list):
        raise ValueError(f"a test of type {kind} needs the name of a function (fn_name) and a list of arguments")
    return {"function": name, "input": json.dumps(arguments), "output": json.dumps(right)}


def _text(value: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError("it has an input or output that is not text")
    return "\n".join(map(str, lines))


def _statement(code: str, entry_point: str | None) -> str:
    """``code``, with the call that HumanEval leaves to its reader."""
    statements = ast.parse(code).body
    functions = [node for node in statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    if entry_point and any(function.name == "check" for function in functions):
        return f"{code}\ncheck({entry_point})"
    executed = [node for statement in statements if statement not in functions for node in ast.walk(statement)]
    if not any(map(_can_fail, executed)):
        raise ValueError("it cannot fail: it has no assert, raise or call that is executed")
    return code


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant | ast.Tuple)
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await))

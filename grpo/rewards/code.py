"""The reward ``python_tests``: the fraction of a row's tests that the completion's code passes.

The code runs in the sandbox (:mod:`grpo.workers.sandbox`). The second half of the file reads tests
in the forms in which datasets publish them.
"""

import ast
import json
import re
import textwrap
from collections.abc import Mapping

from grpo.rewards.answers import after_thinking, reference_texts, tag_content
from grpo.rewards.builtin import ANSWER_REWARDS, Rewards, score_rows
from grpo.workers.sandbox import Limits, SandboxResult, run_python

MAX_CODE_LENGTH = 100_000
"""Largest number of characters in code that is run."""
TEST_FORMS_HINT = (
    "a row has a list of tests; each is a statement such as 'assert f(2) == 4', "
    "or {'input': ..., 'output': ...}; docs/rewards.md has other forms"
)
_FENCED_BLOCK = r"(?s)(?P<fence>`{3,}+)(?:[^\n`]*\n)?(?P<code>.*?)(?:(?P=fence)|\Z)"
"""Pattern of a fenced block. The closing fence may be missing, as in a truncated response."""
_LIST_AS_TEXT = r"""(?s)\s*+\[(?:[\s,]*+(?:"(?:\\.|[^"\\])*+"|'(?:\\.|[^'\\])*+'))++[\s,]*+\]\s*+"""
"""Pattern of a list of quoted texts, such as ``['70', '71']`` and ``["70"]``.

An interval such as ``[70, 71]`` does not match.
"""
_CALL_PROGRAM = """
import io, json, sys, types
arguments = json.load(sys.stdin)
output = sys.stdout
sys.stdin = io.StringIO()
sys.stdout = io.StringIO()
solution = sys.modules["solution"] = types.ModuleType("solution")
exec("from typing import *", solution.__dict__)
try:
    exec(compile({code!r}, "solution.py", "exec"), solution.__dict__)
except SystemExit:
    pass
owner = solution
if hasattr(getattr(solution, "Solution", None), {function!r}):
    owner = solution.Solution()
print(json.dumps(getattr(owner, {function!r})(*arguments)), file=output, flush=True)
"""
"""Program that calls a function in ``code``, or a method of its class ``Solution``.

The arguments are JSON on stdin, and the result is JSON on stdout. Text that the code prints is
discarded.
"""


def python_tests(
    prompts,
    completions,
    *,
    value=1.0,
    tag=None,
    column="tests",
    test_seconds=Limits.test_seconds,
    total_seconds=Limits.total_seconds,
    memory_mb=Limits.memory_mb,
    allow_unsandboxed=False,
    **columns,
) -> Rewards:
    """Score ``value`` times the fraction of the row's tests that the code passes.

    A completion without code scores 0. The score is ``None`` if the row has no tests.
    :func:`extract_code` finds the code, and :func:`read_tests` reads the tests. Outputs are
    compared outside the sandbox. In the output of a program, white space at the ends of lines is
    ignored.

    ``total_seconds`` limits the time of all tests of one completion. It must be less than
    ``reward.timeout_s``. Code that hangs then scores 0, not ``None``.
    """
    limits = Limits(test_seconds, total_seconds, memory_mb)
    # A call without rows checks a configuration: fail now on a machine without the sandbox.
    if not completions:
        run_python("", [{"code": ""}], limits, allow_unsandboxed=allow_unsandboxed)

    def score(text, raw, entry_point):
        tests = read_tests(raw, entry_point)
        if not tests:
            return None
        code = extract_code(text, tag)
        if code is None:
            return 0.0
        if "function" in tests[0]:
            code = _CALL_PROGRAM.format(code=code, function=tests[0]["function"])
        # The expected outputs stay outside the sandbox, where the code could print them.
        expected = [test.pop("output", None) for test in tests]
        results = run_python(code, tests, limits, allow_unsandboxed=allow_unsandboxed)
        num_passed = sum(map(_has_passed, tests, expected, results))
        return value * num_passed / len(tests)

    columns.setdefault("entry_point", [None] * len(completions))
    return score_rows(score, completions, columns, column, "entry_point")


# The runner calls this reward with one row at a time: total_seconds limits one row, and must stay
# below the limit of a call.
python_tests.row_by_row = True


def _has_passed(test: dict, expected: str | None, result: SandboxResult) -> bool:
    if result.status != "passed":
        return False
    if expected is None:
        return True
    if "function" not in test:
        return _comparable_lines(result.output) == _comparable_lines(expected)
    try:
        return json.loads(result.output) in json.loads(expected)
    except (ValueError, RecursionError):  # the code wrote something else
        return False


def _comparable_lines(text: str) -> list[str]:
    # Judges of programming contests end a line only at a newline. splitlines() would also end it at
    # a form feed or U+2028, and a plain rstrip() would remove these.
    return [line.rstrip(" \t\r") for line in text.rstrip(" \t\r\n").split("\n")]


def extract_code(text: str, tag: str | None) -> str | None:
    """Return the last fenced block after the thinking or, without a block, all of that text.

    With ``tag``, the text inside ``<tag>...</tag>`` is read instead, and the tag must occur exactly
    once. Return ``None`` if there is no code, or if it is longer than ``MAX_CODE_LENGTH``.
    """
    text = after_thinking(text) if tag is None else tag_content(text, tag) or ""
    code = text
    for block in re.finditer(_FENCED_BLOCK, text):
        code = block["code"]
    if not code.strip() or len(code) > MAX_CODE_LENGTH:
        return None
    # A block in a list of Markdown is indented.
    return textwrap.dedent(code)


def check_rows(
    specs: list,
    rows: list[Mapping],
    source: str,
    places: list[str],
    *,
    has_pattern: bool,
) -> None:
    """Raise ``ValueError`` if a reward cannot read the tests or the reference answer of a row.

    Args:
        specs: objects with the name and the args of each reward.
        source: the name of the dataset in messages.
        places: the name of each row in messages.
        has_pattern: True if ``data.answer_pattern`` has extracted the answers in the column
            ``answer``. These answers are not checked.
    """
    for spec in specs:
        # A user's reward may read rows of any form, so it is not checked.
        has_tests = spec.name == "python_tests"
        if not has_tests and spec.name not in ANSWER_REWARDS:
            continue
        column = spec.args.get("column", "tests" if has_tests else "answer")
        if not has_tests and has_pattern and column == "answer":
            continue
        for place, row in zip(places, rows, strict=True):
            value = row.get(column)
            try:
                if has_tests:
                    read_tests(value, row.get("entry_point"))
                else:
                    _check_reference(value)
            except Exception as error:  # the dataset may hold anything
                mistake = error
                if has_tests:
                    mistake = (
                        f"{value!r:.100} is no test that can be read ({error!r}); {TEST_FORMS_HINT}"
                    )
                raise ValueError(f"{source}, {place}, column {column}: {mistake}") from None


def _check_reference(value: object) -> None:
    # No answer equals a mapping or the text of a list, so every reward would be 0.
    if isinstance(value, Mapping):
        raise ValueError(
            "a mapping is no answer: data.answer_column=COLUMN.KEY takes one of its keys, "
            f"{', '.join(map(str, value))}"
        )
    if isinstance(value, str) and re.fullmatch(_LIST_AS_TEXT, value):
        raise ValueError(
            f"{value:.60} is the text of a list: data.answer_pattern takes an answer out of it, "
            "and '(?s)(.*)' the whole"
        )
    reference_texts(value)


def read_tests(raw: object, entry_point: str | None) -> list[dict]:
    """Read the tests of a row. ``docs/rewards.md`` lists the forms in which datasets publish them.

    Each test is returned in one of three forms:

    - ``{"code": ...}``: statements that raise if the completion's code is wrong.
    - ``{"input": ..., "output": ...}``: stdin of a program, and the stdout that is expected.
    - ``{"function": ..., "input": ..., "output": ...}``: the name of a function, its arguments as a
      JSON list, and all right results as a JSON list.

    Args:
        entry_point: name of the function that a HumanEval test calls.

    Raises:
        Exception: of any type, if the tests have another form.
    """
    tests = []
    for test in _published_tests(raw):
        if not isinstance(test, str):
            tests.append(_read_case(test))
        elif test.strip():
            tests.append({"code": _statement_test(test, entry_point)})
    # One program runs all tests of a completion.
    if len({test.get("function") for test in tests}) > 1:
        raise ValueError("all tests of a row must call the same function, or none a function")
    return tests


def _published_tests(raw: object) -> list:
    """Return the list of a row's tests, each in the form in which the dataset published it."""
    if isinstance(raw, str):
        if not re.match(r"\s*[\[{]", raw):
            return [raw]  # a statement
        raw = json.loads(raw)
    if not isinstance(raw, Mapping):
        return [] if raw is None else raw

    # A column of structs has every key in every row, with None for the keys that a row lacks.
    fields = {key: value for key, value in raw.items() if value is not None}
    if "test_cases" in fields:
        return fields["test_cases"]
    inputs = fields.get("inputs", fields.get("input"))
    outputs = fields.get("outputs", fields.get("output"))
    # With fn_name, the list `input` has the arguments of one call.
    is_one_call = "inputs" not in fields and "fn_name" in fields
    if is_one_call or not isinstance(inputs, list) or not isinstance(outputs, list):
        return [fields]
    return [
        fields | {"input": test_input, "output": output}
        for test_input, output in zip(inputs, outputs, strict=True)
    ]


def _read_case(test: Mapping) -> dict:
    """Return a test that has an input and an output, in a form of :func:`read_tests`.

    The type of the test says whether it tests a program or a function. A test without a type tests
    a function if it names a function, else a program.
    """
    arguments = test["input"]
    result = test["output"]
    name = test.get("fn_name")
    metadata = test.get("metadata")
    if not name and isinstance(metadata, Mapping):
        name = metadata.get("func_name")
    kind = test.get("type") or test.get("testtype") or ("functional" if name else "stdin")
    if kind in ("stdin", "stdin_stdout"):
        return {"input": _as_text(arguments), "output": _as_text(result)}

    right_results = [result]
    if isinstance(arguments, str):  # LiveCodeBench has a line of JSON for each argument
        arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        right_results = [json.loads(result)]
    elif isinstance(result, list) and len(result) == 1:
        # APPS wraps a result in a list, and other datasets do not. So the list counts as right, and
        # so does its item.
        right_results += result
    if not name or not isinstance(arguments, list):
        raise ValueError(
            f"a test of type {kind} needs the name of a function (fn_name) and a list of arguments"
        )
    return {"function": name, "input": json.dumps(arguments), "output": json.dumps(right_results)}


def _as_text(value: object) -> str:
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError("it has an input or output that is not text")
    return "\n".join(map(str, lines))


def _statement_test(code: str, entry_point: str | None) -> str:
    """Return the code of a test, with a call of ``check`` added to a HumanEval test.

    A HumanEval test defines ``check``, and does not call it. A test that cannot fail raises
    ValueError, since every completion would pass it.
    """
    executed = []
    for statement in ast.parse(code).body:
        # Only functions and classes have a name. Their bodies run only if something calls them.
        name = getattr(statement, "name", None)
        if name is None:
            executed += ast.walk(statement)
        elif name == "check" and entry_point:
            return f"{code}\ncheck({entry_point})"
    if not any(map(_can_fail, executed)):
        raise ValueError("it cannot fail: it has no assert, raise or call that is executed")
    return code


def _can_fail(node: ast.AST) -> bool:
    match node:
        case ast.Assert():
            # `assert (f(2), 4)` is a tuple, which is always true.
            return not isinstance(node.test, ast.Constant | ast.Tuple)
        case ast.Raise() | ast.Expr(value=ast.Call() | ast.Await()):
            return True
    return False

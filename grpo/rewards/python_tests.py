"""``python_tests``: the fraction of a row's tests that the completion's code passes, run in the sandbox."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.rewards.builtin import column_values, require_number, require_tag
from grpo.rewards.extract import completion_text, tag_content
from grpo.rewards.sandbox import Limits, run_python

LONGEST_CODE = 100_000
_FENCE = "```"


def python_tests(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    value: float = 1.0,
    tag: str | None = None,
    column: str = "tests",
    test_seconds: float = 2.0,
    total_seconds: float = 6.0,
    memory_mb: int = 512,
    processes: int = 8,
    output_kb: int = 1024,
    allow_unsandboxed: bool = False,
    **columns: Any,
) -> list[float | None]:
    """``value`` times the fraction of tests passed; 0 without code, ``None`` without tests.

    The code is the last fenced block (or all) of the response, or of the one ``<tag>...</tag>`` in it. A row's tests: a list (or
    its JSON) of statements such as ``"assert f(2) == 4"``, or of ``{"input": ..., "output": ...}`` for a program that reads stdin;
    outputs are compared outside the sandbox, up to white space at the ends of lines.

    Keep ``total_seconds`` (all tests of a completion) below ``reward.timeout_s``: code that hangs should score 0, not ``None``.
    """
    require_number(value=value)
    if tag is not None:
        require_tag(tag)
    limits = Limits(test_seconds, total_seconds, memory_mb=memory_mb, processes=processes, output_kb=output_kb)
    if not completions:  # how a configuration is checked: let a machine without a sandbox be known at once
        run_python("", [{"code": ""}], limits, allow_unsandboxed=allow_unsandboxed)
    rewards: list[float | None] = []
    for completion, given in zip(completions, column_values(columns, column, completions, "python_tests"), strict=True):
        tests = read_tests(given)
        code = extract_code(completion_text(completion), tag)
        if not tests:
            rewards.append(None)
        elif code is None:
            rewards.append(0.0)
        else:
            # The expected outputs stay here.
            inside = [{k: v for k, v in test.items() if k != "output"} for test in tests]
            verdicts = run_python(code, inside, limits, allow_unsandboxed=allow_unsandboxed)
            passed = [
                verdict.status == "passed" and ("output" not in test or _same_lines(verdict.output, test["output"]))
                for verdict, test in zip(verdicts, tests, strict=True)
            ]
            rewards.append(value * sum(passed) / len(passed))
    return rewards


python_tests.row_by_row = True


def extract_code(text: str, tag: str | None = None) -> str | None:
    """The last block between fences, or the whole text where there is no fence; ``None`` if that is empty or too long.

    With ``tag``, of what is inside the one ``<tag>...</tag>`` (``None`` without it). A block that was cut off counts as a block.
    """
    if tag is not None:
        inside = tag_content(text, tag)
        if inside is None:
            return None
        text = inside
    parts = text.split(_FENCE)
    if len(parts) > 1:
        # Odd parts are inside fences.
        text = parts[-2] if len(parts) % 2 else parts[-1]
        language, newline, rest = text.partition("\n")
        text = rest if newline and language.strip().lower() in ("", "python", "python3", "py") else text
    return text if text.strip() and len(text) <= LONGEST_CODE else None


def read_tests(given: Any) -> list[dict[str, str]]:
    """A row's tests in one form: ``{"code": ...}`` or ``{"input": ..., "output": ...}``.

    Raises:
        ValueError: if they are neither.
    """
    if isinstance(given, str):
        try:
            parsed = json.loads(given)
        except json.JSONDecodeError:
            parsed = given
        given = parsed if isinstance(parsed, list) else [given]
    tests = []
    for test in given or []:
        if isinstance(test, str):
            tests.append({"code": test})
        elif isinstance(test, Mapping) and {"input", "output"} <= set(test):
            tests.append({"input": str(test["input"]), "output": str(test["output"])})
        else:
            raise ValueError(f"a test is a statement or {{'input': ..., 'output': ...}}, got {test!r:.200}")
    return [test for test in tests if test.get("code", "x").strip()]


def _same_lines(first: str, second: str) -> bool:
    return [line.rstrip() for line in first.rstrip().splitlines()] == [
        line.rstrip() for line in second.rstrip().splitlines()
    ]

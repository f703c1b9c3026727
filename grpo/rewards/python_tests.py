"""The reward ``python_tests``: the fraction of a row's tests that the completion's code passes in the sandbox."""

import json
from collections.abc import Mapping
from typing import Any

from grpo.rewards.arguments import Scores, column_values, require_number, require_tag
from grpo.rewards.extract import completion_text, tag_content
from grpo.rewards.sandbox import Limits, run_python

MAX_CODE_LENGTH = 100_000


def python_tests(
    prompts, completions, *, value=1.0, tag=None, column="tests", test_seconds=2.0, total_seconds=6.0, memory_mb=512,
    processes=8, output_kb=1024, allow_unsandboxed=False, **columns,
) -> Scores:  # fmt: skip
    """``value`` times the fraction of tests passed; 0 without code, ``None`` without tests.

    The code is the last fenced block of the response, or the whole response if it has none; with ``tag``, the same inside the only
    ``<tag>...</tag>``. The tests of a row are a list, or its JSON, of statements such as ``"assert f(2) == 4"`` or of ``{"input": ...,
    "output": ...}`` for a program that reads stdin. Outputs are compared outside the sandbox, up to white space at the ends of lines.

    ``total_seconds`` (all tests of one completion) must be less than ``reward.timeout_s``: code that hangs then scores 0, not ``None``.
    """
    require_number(value=value)
    if tag is not None:
        require_tag(tag)
    limits = Limits(test_seconds, total_seconds, memory_mb=memory_mb, processes=processes, output_kb=output_kb)
    if not completions:  # this call checks a configuration: fail now on a machine that cannot provide the sandbox
        run_python("", [{"code": ""}], limits, allow_unsandboxed=allow_unsandboxed)
    rewards: Scores = []
    for completion, given in zip(completions, column_values(columns, column, completions, "python_tests"), strict=True):
        tests = read_tests(given)
        code = extract_code(completion_text(completion), tag)
        if not tests:
            rewards.append(None)
        elif code is None:
            rewards.append(0.0)
        else:
            # The code must not see the expected outputs.
            visible_tests = [{k: v for k, v in test.items() if k != "output"} for test in tests]
            results = run_python(code, visible_tests, limits, allow_unsandboxed=allow_unsandboxed)
            passed = [
                result.status == "passed" and ("output" not in test or _same_lines(result.output, test["output"]))
                for result, test in zip(results, tests, strict=True)
            ]
            rewards.append(value * sum(passed) / len(passed))
    return rewards


python_tests.row_by_row = True


def extract_code(text: str, tag: str | None = None) -> str | None:
    """The last fenced code block of a text, or the whole text without a fence; ``None`` if that is empty or too long.

    With ``tag``, only the text inside the only ``<tag>...</tag>`` is read (``None`` without that tag). A last block without a closing
    fence, from a truncated response, counts too.
    """
    parts = (text if tag is None else tag_content(text, tag) or "").split("```")
    text = parts[0]
    if len(parts) > 1:
        # Parts at odd positions are inside fences.
        text = parts[-2] if len(parts) % 2 else parts[-1]
        language, newline, rest = text.partition("\n")
        text = rest if newline and language.strip().lower() in ("", "python", "python3", "py") else text
    return text if text.strip() and len(text) <= MAX_CODE_LENGTH else None


def read_tests(given: Any) -> list[dict[str, str]]:
    """The tests of a row, each as ``{"code": ...}`` or ``{"input": ..., "output": ...}``; ``ValueError`` for any other form."""
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


def _same_lines(*texts: str) -> bool:
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in texts)
    return first == second

"""The reward ``python_tests``: the fraction of a row's tests that the completion's code passes in the sandbox."""

import json
import re
import textwrap

from grpo.rewards.answers import completion_text, tag_content
from grpo.rewards.arguments import Scores, column_values, require_number, require_tag
from grpo.rewards.code_tests import CALL_PROGRAM, read_tests
from grpo.rewards.sandbox import Limits, SandboxResult, run_python

MAX_CODE_LENGTH = 100_000
_FENCE = re.compile(r"`{3,}|^[ \t]*~{3,}(?=\w*[ \t]*$)", re.MULTILINE)
_FENCE_OR_TAG = re.compile(r"```|(^[ \t]*)?(</?think>)", re.MULTILINE)
_INFO = re.compile(r"\s*|[\s{.]*(i?python|py)\b.*|[\s{.]*(i?python|py)\d.*", re.IGNORECASE)
"""The text after an opening fence: empty, or the name of the language, with a version or attributes."""


def python_tests(
    prompts, completions, *, value=1.0, tag=None, column="tests", test_seconds=2.0, total_seconds=6.0, memory_mb=512,
    processes=8, output_kb=1024, allow_unsandboxed=False, **columns,
) -> Scores:  # fmt: skip
    """``value`` times the fraction of tests passed; 0 without code, ``None`` without tests.

    The code is the last fenced block after the thinking, or all text after it without a fence; with ``tag``, the same inside the only
    ``<tag>...</tag>``. The tests of a row are statements such as ``"assert f(2) == 4"``, or inputs and outputs of a program that reads
    stdin or of a function: :func:`grpo.rewards.code_tests.read_tests` lists the forms. Outputs are compared outside the sandbox, those
    of a program up to white space at the ends of lines.

    ``total_seconds`` (all tests of one completion) must be less than ``reward.timeout_s``: code that hangs then scores 0, not ``None``.
    """
    require_number(value=value)
    if tag is not None:
        require_tag(tag)
    limits = Limits(test_seconds, total_seconds, memory_mb=memory_mb, processes=processes, output_kb=output_kb)
    if not completions:  # this call checks a configuration: fail now on a machine that cannot provide the sandbox
        run_python("", [{"code": ""}], limits, allow_unsandboxed=allow_unsandboxed)
    rewards: Scores = []
    tests_of_rows = column_values(columns, column, completions, "python_tests")
    entry_points = columns.get("entry_point") or [None] * len(completions)
    for completion, given, entry_point in zip(completions, tests_of_rows, entry_points, strict=True):
        tests = read_tests(given, entry_point)
        code = extract_code(completion_text(completion), tag)
        if not tests:
            rewards.append(None)
        elif code is None:
            rewards.append(0.0)
        else:
            # The code must not see the expected outputs.
            visible_tests = [{k: v for k, v in test.items() if k in ("code", "input")} for test in tests]
            if "function" in tests[0]:
                code = CALL_PROGRAM.format(code=code, function=tests[0]["function"])
            results = run_python(code, visible_tests, limits, allow_unsandboxed=allow_unsandboxed)
            rewards.append(value * sum(map(_passed, tests, results)) / len(tests))
    return rewards


python_tests.row_by_row = True


def extract_code(text: str, tag: str | None = None) -> str | None:
    """The last fenced code block after the thinking, or all text after it without a fence; ``None`` if that is empty or too long.

    With ``tag``, only the text inside the only ``<tag>...</tag>`` is read (``None`` without that tag). Fences are of backticks, or lines
    of tildes. A last block of backticks without a closing fence, from a truncated response, counts too. A block may be indented.
    """
    text = _after_thinking(text) if tag is None else tag_content(text, tag) or ""
    block, opening, no_fences = None, "", _unclosed_lines_of_tildes(text)
    for fence in _FENCE.finditer(text):
        mark = fence[0].strip()
        if not opening and fence.start() not in no_fences:
            block, opening = slice(fence.end(), None), mark
        elif opening and mark.startswith(opening):
            block, opening = slice(block.start, fence.start()), ""
    code = text
    if block is not None:
        info, newline, rest = text[block].partition("\n")
        code = rest if newline and _INFO.fullmatch(info) else text[block]
    return textwrap.dedent(code) if code.strip() and len(code) <= MAX_CODE_LENGTH else None


def _after_thinking(text: str) -> str:
    """As :func:`grpo.rewards.answers.after_thinking`, but a tag inside a fenced block, after other text of its line, is code."""
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


def _unclosed_lines_of_tildes(text: str) -> set[int]:
    """The positions of lines of tildes that no later line of as many tildes closes: these lines are no fences."""
    unclosed, longest = set(), 0
    for line in reversed(list(re.finditer(r"^[ \t]*(~{3,})[ \t]*$", text, re.MULTILINE))):
        if len(line[1]) > longest:
            unclosed.add(line.start())
        longest = max(longest, len(line[1]))
    return unclosed


def _passed(test: dict[str, str], result: SandboxResult) -> bool:
    if result.status != "passed" or "code" in test:
        return result.status == "passed"
    if "function" not in test:
        return _same_lines(result.output, test["output"])
    try:
        return json.loads(result.output) in json.loads(test["output"])
    except (ValueError, RecursionError):
        return False


def _same_lines(*texts: str) -> bool:
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in texts)
    return first == second

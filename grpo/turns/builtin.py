"""The built-in tools. Their type hints and docstrings are what the model reads about them."""

import ast
import operator

from grpo.rewards.builtin import ARITHMETIC, evaluate
from grpo.workers.sandbox import Limits, run_python

MAX_EXPONENT = 1000
MAX_BASE = 1e9
"""Larger powers of whole numbers would fill the memory, since the calculator computes exactly."""
RUNNER = """
import sys, traceback
# What was printed is not lost if the program is killed.
sys.stdout.reconfigure(line_buffering=True)
try:
    exec(compile(sys.stdin.read(), '<code>', 'exec'), {'__name__': '__main__'})
except BaseException as error:
    print(''.join(traceback.format_exception_only(error)), end='')
"""
"""A program that runs the model's program, which comes on stdin, and prints its error."""
LIMITS = Limits(test_seconds=5.0, total_seconds=8.0)
"""Less than the default of ``reward.timeout_s``, which kills the worker and its environments."""


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, for example 12*(3+4)

    Returns:
        The number.
    """
    value = evaluate(expression.strip(), OPERATORS)
    # Python refuses to write a whole number of more than 4,300 digits.
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _power(base: int | float, exponent: int | float) -> int | float:
    """Return a power. ValueError if it is too large, or complex, which is no number to a model."""
    if abs(exponent) > MAX_EXPONENT or abs(base) > MAX_BASE:
        raise ValueError("the power is too large")
    if base < 0 and exponent != int(exponent):
        raise ValueError("the power is not a real number")
    return base**exponent


OPERATORS = ARITHMETIC | {
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program; it must print what you want to see

    Returns:
        The printed text, with the error at its end if the program raised one.
    """
    (result,) = run_python(RUNNER, [{"input": code}], LIMITS)
    if result.status == "passed":
        return result.output or "(the program printed nothing)"
    # The reason comes first, since `rollout.max_tool_tokens` cuts a long result at its end.
    reason = "was ended, or failed"
    if result.status == "output":
        reason = "printed too much, and was ended"
    return f"(the program {reason})\n{result.output}"


TOOLS = {"calculator": calculator, "python": python}

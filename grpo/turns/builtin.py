"""The built-in tools. The model reads the type hints and the docstring of each tool."""

import ast
import operator

from grpo.rewards.builtin import ARITHMETIC, evaluate
from grpo.workers.sandbox import Limits, run_python

MAX_EXPONENT = 1000
MAX_BASE = 1e9
"""Largest base of a power in the calculator. ``MAX_EXPONENT`` is the largest exponent.

Powers of whole numbers are computed exactly, so larger powers could fill the memory.
"""
RUNNER = """
import sys, traceback
# What was printed is not lost if the program is killed.
sys.stdout.reconfigure(line_buffering=True)
try:
    exec(compile(sys.stdin.read(), '<code>', 'exec'), {'__name__': '__main__'})
except BaseException as error:
    print(''.join(traceback.format_exception_only(error)), end='')
"""
"""Program that reads the model's program from stdin, runs it, and prints the error it raises."""
LIMITS = Limits(test_seconds=5.0, total_seconds=8.0)
"""Time limits of the model's program, below the default of ``reward.timeout_s``.

A tool that exceeds ``reward.timeout_s`` costs the worker process, with all its environments.
"""


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, for example 12*(3+4)

    Returns:
        The number.
    """
    value = evaluate(expression.strip(), OPERATORS)
    # str() raises for a whole number of more than 4,300 digits, and the model reads the error.
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _power(base: int | float, exponent: int | float) -> int | float:
    """Return a power. Raises ValueError if the result is too large, or is a complex number."""
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
    return f"(the program failed, or took too long or printed too much)\n{result.output}"


TOOLS = {"calculator": calculator, "python": python}

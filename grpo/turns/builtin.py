"""The built-in tools. Their type hints and docstrings are what the model reads about them."""

import ast
import operator
import re

from grpo.rewards.builtin import ARITHMETIC, evaluate
from grpo.workers.sandbox import Limits, run_python

MAX_EXPONENT = 1000
MAX_DIGITS = 1000
"""Digits of a whole number that the calculator writes."""
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(,\d{3})+(?![\d,])")
"""A number whose commas part thousands. Any other comma is an error: ``3,5`` may be 3.5 or 35."""
PROGRAM = """
import sys, traceback
# What was printed is not lost if the program is killed.
sys.stdout.reconfigure(line_buffering=True)
try:
    exec(compile(sys.stdin.read(), '<code>', 'exec'), {'__name__': '__main__'})
except BaseException as error:
    print(''.join(traceback.format_exception_only(error)), end='')
"""
"""Runs the program on its stdin."""
LIMITS = Limits(test_seconds=5.0, total_seconds=8.0)


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, for example 12*(3+4)

    Returns:
        The number.
    """
    without_commas = THOUSANDS.sub(
        lambda number: number[0].replace(",", ""),
        expression,
    )
    value = evaluate(without_commas.strip(), OPERATORS)
    if isinstance(value, complex):
        raise ValueError("not a real number")
    if isinstance(value, float):
        return f"{value:.15g}"
    if abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return str(value)


def _power(base: int | float, exponent: int | float) -> int | float:
    if abs(exponent) > MAX_EXPONENT or abs(base) > 1e9:
        raise ValueError("the power is too large")
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
    (result,) = run_python(PROGRAM, [{"input": code}], LIMITS)
    if result.status == "timeout":
        raise TimeoutError(f"the program did not end within {LIMITS.test_seconds:g} seconds")
    if result.status == "passed":
        return result.output or "(the program printed nothing)"
    # First, since a long result is cut at its end.
    end = f"ended with exit status {result.exit_code}"
    if result.status == "output":
        end = f"printed more than {LIMITS.output_kb} KB, and was ended"
    elif result.exit_code < 0:
        end = f"was ended by signal {-result.exit_code}"
    return f"(the program {end})\n{result.output}"


TOOLS = {"calculator": calculator, "python": python}

"""The built-in tools. Their type hints and docstrings are what the model reads about them."""

import ast
import operator

from grpo.rewards.builtin import ARITHMETIC, evaluate
from grpo.workers.sandbox import Limits, run_python

MAX_EXPONENT = 1000
TRACEBACK = (
    "import sys, traceback\ntry:\n    exec(compile(sys.stdin.read(), '<code>', 'exec'), {'__name__': '__main__'})"
)
TRACEBACK += "\nexcept BaseException as error:\n    print(''.join(traceback.format_exception_only(error)), end='')\n"


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, for example 12*(3+4)

    Returns:
        The number.
    """
    value = evaluate(expression.strip().replace(",", ""), OPERATORS)
    if isinstance(value, complex):
        raise ValueError("not a real number")
    return f"{value:.15g}"


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
    (result,) = run_python(TRACEBACK, [{"input": code}], Limits(test_seconds=5.0, total_seconds=8.0))
    if result.status == "timeout":
        raise TimeoutError("the program did not end within 5 seconds")
    return result.output or "(the program printed nothing)"


TOOLS = {"calculator": calculator, "python": python}
